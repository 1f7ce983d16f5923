# Sourced by the launch scripts: starts processes, waits until they serve, ends all of them with the first.
# Logs lie in $RUN_DIR (a fresh folder under .run/), one file a process.

RUN_DIR=${RUN_DIR:-$PWD/.run/$(date +%H%M%S)-$$}
mkdir -p "$RUN_DIR"
declare -A NAMES=()

start() { # start NAME COMMAND...
    local name=$1; shift
    # A process group of its own: a Ctrl-C in the terminal reaches this script only, which then ends them in turn.
    setsid "$@" >"$RUN_DIR/$name.log" 2>&1 </dev/null &
    NAMES[$!]=$name
}

start_cluster() {
    if [[ -z ${ETCD_ENDPOINTS:-} ]]; then
        command -v etcd >/dev/null || fail "etcd is not on the PATH: apt-get install etcd-server, or set ETCD_ENDPOINTS"
        local client peer; client=$(free_port); peer=$(free_port)
        export ETCD_ENDPOINTS=http://127.0.0.1:$client
        start etcd etcd --data-dir "$RUN_DIR/etcd" --listen-client-urls "$ETCD_ENDPOINTS" \
            --advertise-client-urls "$ETCD_ENDPOINTS" --listen-peer-urls "http://127.0.0.1:$peer" \
            --initial-advertise-peer-urls "http://127.0.0.1:$peer" --initial-cluster "default=http://127.0.0.1:$peer"
    fi
    if [[ -z ${NATS_SERVER:-} ]]; then
        command -v nats-server >/dev/null || fail "nats-server is not on the PATH: apt-get install nats-server, or set NATS_SERVER"
        local port; port=$(free_port)
        export NATS_SERVER=nats://127.0.0.1:$port
        start nats nats-server --addr 127.0.0.1 --port "$port"
    fi
    export BATON_DISCOVERY_BACKEND=etcd BATON_REQUEST_PLANE=nats
}

free_port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

wait_until_ready() { # wait_until_ready URL NUM_PREFILL NUM_DECODE
    local begin=$SECONDS seen="" last=""
    while ((SECONDS - begin < START_TIMEOUT_S)); do
        check_alive
        seen=$("$PYTHON" -m baton status --url "$1" --brief 2>/dev/null) || seen=${seen:-frontend starting}
        if [[ $seen == "$2 prefill, $3 decode" ]]; then
            echo "ready: $1 ($seen)"
            return
        fi
        [[ $seen == "$last" ]] || echo "starting: $seen (of $2 prefill, $3 decode)"
        last=$seen
        sleep 0.3
    done
    fail "not ready after $START_TIMEOUT_S s ($seen); logs: $RUN_DIR, or allow more: START_TIMEOUT_S"
}

check_alive() { # ends everything if a process has gone
    local pid status
    for pid in "${!NAMES[@]}"; do
        kill -0 "$pid" 2>/dev/null && continue
        status=0; wait "$pid" || status=$?
        died "$pid" "$status"
    done
}

wait_for_the_end() {
    local pid="" status=0
    wait -n -p pid "${!NAMES[@]}" || status=$?
    died "$pid" "$status"
}

died() { # died PID STATUS
    local name=${NAMES[$1]}
    unset "NAMES[$1]"
    local last; last=$(tail -n 1 "$RUN_DIR/$name.log")
    if [[ $last == *error:\ * ]]; then # a mistake that the process itself names
        echo "$name: $last" >&2
    else
        echo "$name ended with status $2; its last lines (all of them: $RUN_DIR/$name.log):" >&2
        tail -n 15 "$RUN_DIR/$name.log" | sed "s/^/  $name | /" >&2
    fi
    end_all
    exit 1
}

end_all() { # frontend first, so that it stops taking requests; then everybody else at once
    trap '' INT TERM HUP
    local pid name
    for name in frontend ""; do
        for pid in "${!NAMES[@]}"; do
            [[ -z $name || ${NAMES[$pid]} == "$name" ]] || continue
            kill -TERM "$pid" 2>/dev/null || true
        done
    done
    local begin=$SECONDS
    for pid in "${!NAMES[@]}"; do
        while kill -0 "$pid" 2>/dev/null && ((SECONDS - begin < 35)); do sleep 0.1; done
        kill -KILL "$pid" 2>/dev/null || true
    done
}

fail() { echo "error: $*" >&2; end_all; exit 1; }

trap 'echo; echo "stopping"; end_all; exit 0' INT TERM HUP
