#!/usr/bin/env bash
# gpt-oss-20b on one GPU of 20 GB or more, or prefill and decode on two of 24 GB.
#   launch/gpt_oss_20b.sh [--disagg] [--dry-run]
# Runs the gpt-oss-120b scripts with other defaults; their variables work here too.
set -euo pipefail
cd "$(dirname "$0")/.."
disagg="" dry_run=()
for argument in "$@"; do
    case $argument in
        --disagg) disagg=1 ;;
        --dry-run) dry_run=(--dry-run) ;;
        *) echo "usage: launch/gpt_oss_20b.sh [--disagg] [--dry-run]" >&2; exit 2 ;;
    esac
done

configs=engine_configs/gpt-oss-20b
export SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-openai/gpt-oss-20b}
if [[ -n $disagg ]]; then
    export PREFILL_CUDA_VISIBLE_DEVICES=${PREFILL_CUDA_VISIBLE_DEVICES:-0}
    export DECODE_CUDA_VISIBLE_DEVICES=${DECODE_CUDA_VISIBLE_DEVICES:-1}
    export PREFILL_ENGINE_ARGS=${PREFILL_ENGINE_ARGS:-$configs/prefill.yaml}
    export DECODE_ENGINE_ARGS=${DECODE_ENGINE_ARGS:-$configs/decode.yaml}
    export PREFILL_FLAGS=${PREFILL_FLAGS-} DECODE_FLAGS=${DECODE_FLAGS-} # the YAML has all of them
    exec launch/gpt_oss_disagg.sh "${dry_run[@]}"
fi
export NUM_GPUS=${NUM_GPUS:-1} ENGINE_ARGS=${ENGINE_ARGS:-$configs/agg.yaml} FLAGS=${FLAGS-}
exec launch/gpt_oss_agg.sh "${dry_run[@]}"
