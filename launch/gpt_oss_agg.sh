#!/usr/bin/env bash
# gpt-oss-120b on one aggregated worker.
#   launch/gpt_oss_agg.sh [PROFILE] [--dry-run]
# PROFILE names a file engine_configs/gpt-oss-120b/agg_*.yaml: low-latency (the default), max-throughput, h200 (short for
# h200-low-latency), h200-max-throughput, spark, eval-dep-low, ... Override the variables below and those at the top of
# launch/trtllm.sh in the environment. FLAGS replaces the default flags; EXTRA_FLAGS are added after them.
# Profiles for load tests and evaluations (low-latency-720, max-throughput, eval-..., ...) let requests wait for a place
# until their deadline, a day for evaluations, whose clients wait as long. FRONTEND_FLAGS="--max-wait-s 50" limits that.
set -euo pipefail
cd "$(dirname "$0")/.."
configs=engine_configs/gpt-oss-120b
profile=low-latency
for argument in "$@"; do
    case $argument in
        --dry-run) DRY_RUN=1 ;;
        h200) profile=h200-low-latency ;;
        *) profile=$argument ;;
    esac
done
ENGINE_ARGS=${ENGINE_ARGS:-$configs/agg_${profile//-/_}.yaml}
if [[ ! -f $ENGINE_ARGS ]]; then
    profiles=("$configs"/agg_*.yaml); profiles=("${profiles[@]#"$configs/agg_"}"); profiles=("${profiles[@]%.yaml}")
    { echo "usage: launch/gpt_oss_agg.sh [PROFILE] [--dry-run]; there is no $ENGINE_ARGS"
      echo "profiles: h200 ${profiles[*]//_/-}"; } >&2
    exit 2
fi

case $profile in
    eval-*) REQUEST_TIMEOUT_S=${REQUEST_TIMEOUT_S:-86400} ;;&
    eval-* | *max-throughput* | low-latency-720) FRONTEND_FLAGS="--max-wait-s 0 ${FRONTEND_FLAGS:-}" ;;
esac
SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-openai/gpt-oss-120b}
[[ $profile != spark ]] || NUM_GPUS=${NUM_GPUS:-1}
NUM_GPUS=${NUM_GPUS:-8}
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((NUM_GPUS - 1)))}

. launch/trtllm.sh

tp=$(gpus_each "$CUDA_VISIBLE_DEVICES" 1)
read -rd "" -a flags <<<"${FLAGS---tensor-parallel-size $tp --expert-parallel-size $tp} ${EXTRA_FLAGS:-}" || true

prepare --engine-args "$ENGINE_ARGS" --gpus "$CUDA_VISIBLE_DEVICES" --flags="${flags[*]}"
start_frontend
start_workers agg 1 "$CUDA_VISIBLE_DEVICES" "$ENGINE_ARGS" "${flags[@]}"
serve 0 1
