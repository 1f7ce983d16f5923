#!/usr/bin/env bash
# gpt-oss on vLLM: prefill on one GPU and decode on another, or both on one.
#   launch/gpt_oss_vllm.sh [20b|120b] [--agg] [--dry-run]     (default: 120b; an H200 holds either)
# Override the variables below and those at the top of launch/trtllm.sh in the environment. A role's GPUs are divided
# evenly among its workers. *FLAGS replace the default flags; *EXTRA_FLAGS are added after them.
set -euo pipefail
cd "$(dirname "$0")/.."
size=120b agg=""
for argument in "$@"; do
    case $argument in
        20b | 120b) size=$argument ;;
        --agg) agg=1 ;;
        --dry-run) DRY_RUN=1 ;;
        *) echo "usage: launch/gpt_oss_vllm.sh [20b|120b] [--agg] [--dry-run]" >&2; exit 2 ;;
    esac
done

configs=engine_configs/vllm/gpt-oss-$size
ENGINE=${ENGINE:-vllm}
# Turns of a conversation go where their KV is; decode prefills some while prefill is busy. Measured: benchmarks/results/agent_turns_20b.json.
ROUTER_MODE=${ROUTER_MODE:-prefix}
[[ -n $agg ]] || LOCAL_PREFILL_TOKENS=${LOCAL_PREFILL_TOKENS:-8192} LOCAL_PREFILL_AFTER_S=${LOCAL_PREFILL_AFTER_S:-0.3}
SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-openai/gpt-oss-$size}
NUM_PREFILL=${NUM_PREFILL:-1}
NUM_DECODE=${NUM_DECODE:-1}
PREFILL_CUDA_VISIBLE_DEVICES=${PREFILL_CUDA_VISIBLE_DEVICES:-0}
DECODE_CUDA_VISIBLE_DEVICES=${DECODE_CUDA_VISIBLE_DEVICES:-1}
PREFILL_ENGINE_ARGS=${PREFILL_ENGINE_ARGS:-$configs/prefill.yaml}
DECODE_ENGINE_ARGS=${DECODE_ENGINE_ARGS:-$configs/decode.yaml}
NUM_AGG=${NUM_AGG:-1}
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
ENGINE_ARGS=${ENGINE_ARGS:-$configs/agg.yaml}

. launch/trtllm.sh

if [[ -n $agg ]]; then
    tp=$(gpus_each "$CUDA_VISIBLE_DEVICES" "$NUM_AGG")
    read -rd "" -a flags <<<"${FLAGS---tensor-parallel-size $tp} ${EXTRA_FLAGS:-}" || true
    prepare --engine-args "$ENGINE_ARGS" --gpus "$(shares "$CUDA_VISIBLE_DEVICES" "$NUM_AGG")" --flags="${flags[*]}"
    start_frontend
    start_workers agg "$NUM_AGG" "$CUDA_VISIBLE_DEVICES" "$ENGINE_ARGS" "${flags[@]}"
    serve 0 "$NUM_AGG"
fi
prefill_tp=$(gpus_each "$PREFILL_CUDA_VISIBLE_DEVICES" "$NUM_PREFILL")
decode_tp=$(gpus_each "$DECODE_CUDA_VISIBLE_DEVICES" "$NUM_DECODE")
read -rd "" -a prefill_flags <<<"${PREFILL_FLAGS---tensor-parallel-size $prefill_tp} ${PREFILL_EXTRA_FLAGS:-}" || true
read -rd "" -a decode_flags <<<"${DECODE_FLAGS---tensor-parallel-size $decode_tp} ${DECODE_EXTRA_FLAGS:-}" || true
prepare --prefill-engine-args "$PREFILL_ENGINE_ARGS" --decode-engine-args "$DECODE_ENGINE_ARGS" \
    --prefill-gpus "$(shares "$PREFILL_CUDA_VISIBLE_DEVICES" "$NUM_PREFILL")" --prefill-flags="${prefill_flags[*]}" \
    --decode-gpus "$(shares "$DECODE_CUDA_VISIBLE_DEVICES" "$NUM_DECODE")" --decode-flags="${decode_flags[*]}"
start_frontend
start_workers prefill "$NUM_PREFILL" "$PREFILL_CUDA_VISIBLE_DEVICES" "$PREFILL_ENGINE_ARGS" "${prefill_flags[@]}"
start_workers decode "$NUM_DECODE" "$DECODE_CUDA_VISIBLE_DEVICES" "$DECODE_ENGINE_ARGS" "${decode_flags[@]}"
serve "$NUM_PREFILL" "$NUM_DECODE"
