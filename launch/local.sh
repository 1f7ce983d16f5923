#!/usr/bin/env bash
# The whole stack on this machine: a frontend, prefill and decode workers, the demo model on the CPU.
#   launch/local.sh             file registry and TCP: nothing else to install
#   launch/local.sh --cluster   etcd and NATS: ETCD_ENDPOINTS and NATS_SERVER, or started here from the PATH
# HTTP_HOST HTTP_PORT PREFILL_WORKERS DECODE_WORKERS MODEL_PATH SERVED_MODEL_NAME ENGINE
# PREFILL_ENGINE_ARGS DECODE_ENGINE_ARGS START_TIMEOUT_S change it.
set -euo pipefail
cd "$(dirname "$0")/.."

HTTP_HOST=${HTTP_HOST:-127.0.0.1}
HTTP_PORT=${HTTP_PORT:-8000}
PREFILL_WORKERS=${PREFILL_WORKERS:-1}
DECODE_WORKERS=${DECODE_WORKERS:-1}
MODEL_PATH=${MODEL_PATH:-models/demo}
SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-openai/gpt-oss-120b}
ENGINE=${ENGINE:-embedded}
PREFILL_ENGINE_ARGS=${PREFILL_ENGINE_ARGS:-engine_configs/demo/prefill.yaml}
DECODE_ENGINE_ARGS=${DECODE_ENGINE_ARGS:-engine_configs/demo/decode.yaml}
START_TIMEOUT_S=${START_TIMEOUT_S:-120}
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}

STOP_STATUS=0 # Ctrl-C is how `make up` ends, no failure
. launch/processes.sh

if [[ ${1:-} == --cluster ]]; then
    start_cluster
elif [[ $# -gt 0 ]]; then
    echo "usage: launch/local.sh [--cluster]" >&2; exit 2
else
    export BATON_FILE_REGISTRY=$RUN_DIR/registry BATON_DISCOVERY_BACKEND=file BATON_REQUEST_PLANE=tcp
fi

start frontend "$PYTHON" -m frontend --http-host "$HTTP_HOST" --http-port "$HTTP_PORT"
worker=("$PYTHON" -m workers --engine "$ENGINE" --model-path "$MODEL_PATH" --served-model-name "$SERVED_MODEL_NAME")
for ((i = 0; i < PREFILL_WORKERS; i++)); do
    start "prefill-$i" "${worker[@]}" --disaggregation-mode prefill --extra-engine-args "$PREFILL_ENGINE_ARGS"
done
for ((i = 0; i < DECODE_WORKERS; i++)); do
    start "decode-$i" "${worker[@]}" --disaggregation-mode decode --extra-engine-args "$DECODE_ENGINE_ARGS"
done
wait_until_ready "http://$HTTP_HOST:$HTTP_PORT" "$PREFILL_WORKERS" "$DECODE_WORKERS"
wait_for_the_end
