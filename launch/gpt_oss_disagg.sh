#!/usr/bin/env bash
# gpt-oss-120b on one node of 8 B200: a frontend, prefill on GPUs 0-3, decode on GPUs 4-7.
#   launch/gpt_oss_disagg.sh             check, start, wait until ready; Ctrl-C stops everything
#   launch/gpt_oss_disagg.sh --dry-run   print the commands, start nothing
# Override the variables below and those at the top of launch/trtllm.sh in the environment. A role's GPUs are divided
# evenly among its workers. *_FLAGS replace the default flags; *_EXTRA_FLAGS are added after them, and the last flag wins.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
    "") ;;
    --dry-run) DRY_RUN=1 ;;
    *) echo "usage: launch/gpt_oss_disagg.sh [--dry-run]" >&2; exit 2 ;;
esac

SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-openai/gpt-oss-120b}
NUM_PREFILL=${NUM_PREFILL:-1}
NUM_DECODE=${NUM_DECODE:-1}
PREFILL_CUDA_VISIBLE_DEVICES=${PREFILL_CUDA_VISIBLE_DEVICES:-0,1,2,3}
DECODE_CUDA_VISIBLE_DEVICES=${DECODE_CUDA_VISIBLE_DEVICES:-4,5,6,7}
PREFILL_ENGINE_ARGS=${PREFILL_ENGINE_ARGS:-engine_configs/gpt-oss-120b/prefill.yaml}
DECODE_ENGINE_ARGS=${DECODE_ENGINE_ARGS:-engine_configs/gpt-oss-120b/decode.yaml}

. launch/trtllm.sh

prefill_tp=$(gpus_each "$PREFILL_CUDA_VISIBLE_DEVICES" "$NUM_PREFILL")
decode_tp=$(gpus_each "$DECODE_CUDA_VISIBLE_DEVICES" "$NUM_DECODE")
PREFILL_FLAGS=${PREFILL_FLAGS---max-num-tokens 20000 --max-batch-size 32 --free-gpu-memory-fraction 0.9 \
    --tensor-parallel-size $prefill_tp --expert-parallel-size $prefill_tp}
DECODE_FLAGS=${DECODE_FLAGS---max-num-tokens 16384 --free-gpu-memory-fraction 0.9 \
    --tensor-parallel-size $decode_tp --expert-parallel-size $decode_tp}
read -rd "" -a prefill_flags <<<"$PREFILL_FLAGS ${PREFILL_EXTRA_FLAGS:-}" || true
read -rd "" -a decode_flags <<<"$DECODE_FLAGS ${DECODE_EXTRA_FLAGS:-}" || true

prepare --prefill-engine-args "$PREFILL_ENGINE_ARGS" --decode-engine-args "$DECODE_ENGINE_ARGS" \
    --prefill-gpus "$(shares "$PREFILL_CUDA_VISIBLE_DEVICES" "$NUM_PREFILL")" \
    --decode-gpus "$(shares "$DECODE_CUDA_VISIBLE_DEVICES" "$NUM_DECODE")" \
    --prefill-flags="${prefill_flags[*]}" --decode-flags="${decode_flags[*]}"
start_frontend
start_workers prefill "$NUM_PREFILL" "$PREFILL_CUDA_VISIBLE_DEVICES" "$PREFILL_ENGINE_ARGS" "${prefill_flags[@]}"
start_workers decode "$NUM_DECODE" "$DECODE_CUDA_VISIBLE_DEVICES" "$DECODE_ENGINE_ARGS" "${decode_flags[@]}"
serve "$NUM_PREFILL" "$NUM_DECODE"
