#!/usr/bin/env bash
# gpt-oss on vLLM: prefill on one GPU and decode on another, both roles on one, or one aggregated worker.
#   launch/gpt_oss_vllm.sh [20b|120b] [--agg | --one-gpu [--prefill-sm-share 100]] [--dry-run]
# The default is 120b; an H200 holds either, or the 20b twice. --one-gpu: GPU $CUDA_VISIBLE_DEVICES, else 0 (deploy/README.md).
# Override the variables below and those at the top of launch/trtllm.sh in the environment. A role's GPUs are divided
# evenly among its workers. *FLAGS replace the default flags; *EXTRA_FLAGS are added after them.
set -euo pipefail
cd "$(dirname "$0")/.."
size=120b agg="" one_gpu="" sm_share=""
refuse() { echo "$1" >&2; exit 2; }
while (($#)); do
    case $1 in
        20b | 120b) size=$1 ;;
        --agg) agg=1 ;;
        --one-gpu) one_gpu=1 ;;
        --prefill-sm-share)
            [[ ${2-} =~ ^([1-9][0-9]?|100)$ ]] || refuse "error: --prefill-sm-share ${2-}: must be 1 to 100, in percent of the GPU's SMs"
            sm_share=$2; shift ;;
        --dry-run) DRY_RUN=1 ;;
        *) refuse "usage: launch/gpt_oss_vllm.sh [20b|120b] [--agg | --one-gpu [--prefill-sm-share 100]] [--dry-run]" ;;
    esac
    shift
done
[[ -z $sm_share || -n $one_gpu ]] || refuse "error: --prefill-sm-share: needs --one-gpu"
[[ -z $one_gpu || -z $agg ]] || refuse "error: --one-gpu and --agg: give one of them"
[[ -z $one_gpu || -z ${CUDA_MPS_PIPE_DIRECTORY:-} || -e $CUDA_MPS_PIPE_DIRECTORY/control ]] ||
    refuse "error: CUDA_MPS_PIPE_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY: no MPS runs there; start it, or unset the variable"

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
if [[ -n $one_gpu ]]; then
    PREFILL_CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES DECODE_CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES
    [[ $CUDA_VISIBLE_DEVICES,$NUM_PREFILL,$NUM_DECODE =~ ^[^,]+,1,1$ ]] ||
        refuse "error: --one-gpu: CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES, NUM_PREFILL=$NUM_PREFILL, NUM_DECODE=$NUM_DECODE: must be one GPU and one worker of each role"
    # When MPS or the GPU fails, both roles end: they start again, and running streams wait for them.
    RESTART_WORKERS=${RESTART_WORKERS-1}
    FRONTEND_FLAGS="--wait-for-worker-s 300 ${FRONTEND_FLAGS:-}"
fi

. launch/trtllm.sh
. launch/one_gpu.sh

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
PREFILL_FLAGS=${PREFILL_FLAGS---tensor-parallel-size $prefill_tp}
DECODE_FLAGS=${DECODE_FLAGS---tensor-parallel-size $decode_tp}
[[ -z $one_gpu ]] || divide_gpu "$CUDA_VISIBLE_DEVICES"
read -rd "" -a prefill_flags <<<"$PREFILL_FLAGS ${PREFILL_EXTRA_FLAGS:-}" || true
read -rd "" -a decode_flags <<<"$DECODE_FLAGS ${DECODE_EXTRA_FLAGS:-}" || true
prepare --prefill-engine-args "$PREFILL_ENGINE_ARGS" --decode-engine-args "$DECODE_ENGINE_ARGS" \
    --prefill-gpus "$(shares "$PREFILL_CUDA_VISIBLE_DEVICES" "$NUM_PREFILL")" --prefill-flags="${prefill_flags[*]}" \
    --decode-gpus "$(shares "$DECODE_CUDA_VISIBLE_DEVICES" "$NUM_DECODE")" --decode-flags="${decode_flags[*]}"
[[ -z $one_gpu ]] || start_mps "$CUDA_VISIBLE_DEVICES" "${sm_share:-100}"
start_frontend
start_workers prefill "$NUM_PREFILL" "$PREFILL_CUDA_VISIBLE_DEVICES" "$PREFILL_ENGINE_ARGS" "${prefill_flags[@]}"
start_workers decode "$NUM_DECODE" "$DECODE_CUDA_VISIBLE_DEVICES" "$DECODE_ENGINE_ARGS" "${decode_flags[@]}"
serve "$NUM_PREFILL" "$NUM_DECODE"
