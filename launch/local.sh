#!/usr/bin/env bash
# The whole stack on this machine: a frontend, prefill and decode workers, the demo model on the CPU.
#   launch/local.sh             file registry and TCP; nothing else to install
#   launch/local.sh --cluster   etcd and NATS: those of ETCD_ENDPOINTS and NATS_SERVER, else started from the PATH
# Environment variables: PREFILL_WORKERS DECODE_WORKERS MODEL_PATH SERVED_MODEL_NAME ENGINE PREFILL_ENGINE_ARGS
# DECODE_ENGINE_ARGS START_TIMEOUT_S RESTART_WORKERS; PREFILL_FLAGS and DECODE_FLAGS, flags of the workers; those at
# the top of launch/processes.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

PREFILL_WORKERS=${PREFILL_WORKERS:-1}
DECODE_WORKERS=${DECODE_WORKERS:-1}
MODEL_PATH=${MODEL_PATH:-models/demo}
SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-openai/gpt-oss-120b}
ENGINE=${ENGINE:-embedded}
both=
[[ $ENGINE != mocker ]] || both=mocker
PREFILL_ENGINE_ARGS=${PREFILL_ENGINE_ARGS:-engine_configs/demo/${both:-prefill}.yaml}
DECODE_ENGINE_ARGS=${DECODE_ENGINE_ARGS:-engine_configs/demo/${both:-decode}.yaml}
START_TIMEOUT_S=${START_TIMEOUT_S:-120}
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}

STOP_STATUS=0 # Ctrl-C is the normal end of `make up`
RESTART_WORKERS=${RESTART_WORKERS-1} # empty: the stack ends with the first worker that ends
. launch/processes.sh

start_cluster() { # starts etcd and NATS unless their addresses are given; returns when they listen
    local started=() port
    if [[ -z ${ETCD_ENDPOINTS:-} ]]; then
        command -v etcd >/dev/null || fail "etcd is not on the PATH: apt-get install etcd-server, or set ETCD_ENDPOINTS"
        port=$(free_port)
        started+=("$port")
        ETCD_ENDPOINTS=http://127.0.0.1:$port
        start etcd etcd --data-dir "$RUN_DIR/etcd" --listen-client-urls "$ETCD_ENDPOINTS" \
            --advertise-client-urls "$ETCD_ENDPOINTS" --listen-peer-urls http://127.0.0.1:0 \
            --initial-advertise-peer-urls http://127.0.0.1:0 --initial-cluster default=http://127.0.0.1:0 # no peers
    fi
    if [[ -z ${NATS_SERVER:-} ]]; then
        command -v nats-server >/dev/null || fail "nats-server is not on the PATH: apt-get install nats-server, or set NATS_SERVER"
        port=$(free_port)
        started+=("$port")
        NATS_SERVER=nats://127.0.0.1:$port
        start nats nats-server --addr 127.0.0.1 --port "$port"
    fi
    export ETCD_ENDPOINTS NATS_SERVER BATON_DISCOVERY_BACKEND=etcd BATON_REQUEST_PLANE=nats
    local deadline=$((SECONDS + START_TIMEOUT_S))
    for port in "${started[@]}"; do
        until listens "$port"; do
            check_alive
            ((SECONDS < deadline)) || fail "etcd and NATS are not listening after $START_TIMEOUT_S s; logs: $RUN_DIR"
            sleep 0.1
        done
    done
}

free_port() { # below the ephemeral range, so that no client's socket takes it
    local port
    while true; do
        port=$((20000 + SRANDOM % 12000))
        listens "$port" || { echo "$port"; return; }
    done
}

if [[ ${1:-} == --cluster ]]; then
    start_cluster
elif [[ $# -gt 0 ]]; then
    echo "usage: launch/local.sh [--cluster]" >&2; exit 2
else
    export BATON_FILE_REGISTRY=$RUN_DIR/registry BATON_DISCOVERY_BACKEND=file BATON_REQUEST_PLANE=tcp
fi

export HTTP_HOST
start_frontend
read -rd "" -a prefill_flags <<<"${PREFILL_FLAGS:-}" || true
read -rd "" -a decode_flags <<<"${DECODE_FLAGS:-}" || true
worker=("$PYTHON" -m workers --engine "$ENGINE" --model-path "$MODEL_PATH" --served-model-name "$SERVED_MODEL_NAME")
for ((i = 0; i < PREFILL_WORKERS; i++)); do
    start "prefill-$i" "${worker[@]}" --name "prefill-$i" --disaggregation-mode prefill --extra-engine-args "$PREFILL_ENGINE_ARGS" "${prefill_flags[@]}"
done
for ((i = 0; i < DECODE_WORKERS; i++)); do
    start "decode-$i" "${worker[@]}" --name "decode-$i" --disaggregation-mode decode --extra-engine-args "$DECODE_ENGINE_ARGS" "${decode_flags[@]}"
done
wait_until_ready "$PREFILL_WORKERS" "$DECODE_WORKERS"
serve_until_the_end
