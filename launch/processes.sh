# Sourced by the launch scripts: starts processes, waits until they serve, stops all of them when one ends.
# With RESTART_WORKERS=1 a worker, or MPS, that ends while the stack serves is started again instead, unless it ends
# three times in a row before it is ready.
# Logs go to $RUN_DIR (a new folder under .run/), one file per process. Set before sourcing:
#   DRY_RUN=1       print each command instead of starting it
#   FOLLOW=1        print the logs as they grow, prefixed with the process's name
#   STOP_STATUS     exit status after Ctrl-C or SIGTERM [128 + signal]
#   STOP_TIMEOUT_S  time that processes get to end before they are killed [35]
#   HTTP_HOST, HTTP_PORT  where the frontend listens [127.0.0.1, 8000; 0.0.0.0 in the images]
#   BATON_API_KEYS_FILE, or BATON_INSECURE=1, which the frontend needs if that is not a loopback address
#   ROUTER_MODE, LOCAL_PREFILL_TOKENS, LOCAL_PREFILL_AFTER_S, REQUEST_TIMEOUT_S  the frontend's flags of these names
#   FRONTEND_FLAGS  any others, added after them: "--max-wait-s 0 --tls-cert-file chain.pem --tls-key-file key.pem"
#   STATUS_FLAGS    flags of `python -m baton status`, which waits for the frontend: a client's certificate
# shellcheck shell=bash

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)) || { echo "error: bash 5.1 or newer is needed" >&2; exit 2; }
RUN_DIR=${RUN_DIR:-$PWD/.run/$(date +%H%M%S)-$$}
# Dynamo's names take precedence, as in the frontend.
HTTP_HOST=${DYN_HTTP_HOST:-${HTTP_HOST:-127.0.0.1}}
HTTP_PORT=${DYN_HTTP_PORT:-${HTTP_PORT:-8000}}
for name in START_TIMEOUT_S STOP_TIMEOUT_S MPS_START_S PREFILL_WORKERS DECODE_WORKERS; do
    [[ ${!name:-0} =~ ^(0|[1-9][0-9]{0,5})$ ]] || { echo "error: $name=${!name}: must be a whole number" >&2; exit 2; }
done
[[ -n ${DRY_RUN:-} ]] || { mkdir -p "$RUN_DIR" && head -c 1M /dev/zero >"$RUN_DIR/try" && rm "$RUN_DIR/try"; } 2>/dev/null ||
    { echo "error: cannot write 1 MiB to $RUN_DIR; set RUN_DIR to a folder for the logs" >&2; exit 2; }
[[ -n ${DRY_RUN:-} ]] || "$PYTHON" -c 'import msgspec, uvloop' 2>/dev/null ||
    { echo "error: $PYTHON cannot run Baton: run \`make install\`, or set PYTHON" >&2; exit 2; }
declare -A NAMES=() COMMANDS=() FAILURES=()  # by process id; by name; how often in a row it ended without having worked
declare -A STARTED=() LOGGED=()              # by name: the time, and the lines of its log before
FOLLOWERS=()
exec {STDERR}>&2
MAX_FAILURES=3 # the end of the stack

start() { # start NAME COMMAND... (`env VAR=value COMMAND...` sets its variables)
    local name=$1; shift
    if [[ -n ${DRY_RUN:-} ]]; then
        echo "$(quoted "$@") &"
        return
    fi
    : >"$RUN_DIR/$name.log"
    COMMANDS[$name]=$(printf '%q ' "$@")
    run "$name" "$@"
    if [[ -n ${FOLLOW:-} ]]; then
        # shellcheck disable=SC2016 # expanded by the inner shell
        setsid bash -c 'tail -n +1 -f "$0" | sed -u "s/^/$1 | /"' "$RUN_DIR/$name.log" "$name" &
        FOLLOWERS+=("$!")
    fi
}

run() { # run NAME COMMAND...: start it, with its output at the end of its log
    local name=$1; shift
    STARTED[$name]=$SECONDS LOGGED[$name]=$(sed -n '$=' "$RUN_DIR/$name.log")
    # Its own process group: Ctrl-C in the terminal reaches only this script, which stops the processes in order.
    setsid "$@" >>"$RUN_DIR/$name.log" 2>&1 </dev/null {STDERR}>&- &
    NAMES[$!]=$name
}

quoted() { # prints a command line that can be pasted into a shell
    [[ $1 != env ]] || shift
    local word line=""
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
        line+="$word "
    done
    echo "${line% }"
}

set_variable() { # set_variable NAME VALUE, for all processes
    export "$1=$2"
    [[ -z ${DRY_RUN:-} ]] || echo "export $(quoted "$1=$2")"
}

start_frontend() {
    [[ ${FRONTEND_FLAGS:-} != *--http-@(host|port)* ]] || fail "set HTTP_HOST and HTTP_PORT, not their flags in FRONTEND_FLAGS"
    # The readiness that `status` would see is that of another stack.
    [[ -n ${DRY_RUN:-} || ${FRONTEND_FLAGS:-} == *--take-over* || ! $HTTP_HOST =~ ^(127.0.0.1|0.0.0.0|localhost)$ ]] ||
        ! listens "$HTTP_PORT" || fail "port $HTTP_PORT is in use; set HTTP_PORT to another one"
    local flags; read -rd "" -a flags <<<"${FRONTEND_FLAGS:-}" || true # they may stand on several lines
    start frontend "$PYTHON" -m frontend ${ROUTER_MODE:+--router-mode "$ROUTER_MODE"} --http-port "$HTTP_PORT" \
        ${LOCAL_PREFILL_TOKENS:+--local-prefill-tokens "$LOCAL_PREFILL_TOKENS"} \
        ${LOCAL_PREFILL_AFTER_S:+--local-prefill-after-s "$LOCAL_PREFILL_AFTER_S"} \
        ${REQUEST_TIMEOUT_S:+--request-timeout-s "$REQUEST_TIMEOUT_S"} "${flags[@]}"
}

listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; } # listens PORT

own_url() { # the frontend's URL on this machine
    local scheme=http
    [[ ${FRONTEND_FLAGS:-} != *--tls-cert-file* ]] || scheme=https
    case $HTTP_HOST in
        0.0.0.0) echo "$scheme://127.0.0.1:$HTTP_PORT" ;;
        ::) echo "$scheme://[::1]:$HTTP_PORT" ;;
        *:*) echo "$scheme://[$HTTP_HOST]:$HTTP_PORT" ;;
        *) echo "$scheme://$HTTP_HOST:$HTTP_PORT" ;;
    esac
}

wait_until_ready() { # wait_until_ready NUM_PREFILL NUM_DECODE; sets READY to the counts
    local begin=$SECONDS report=0 seen="frontend starting" last="" num_prefill num_decode is_served url flags
    url=$(own_url)
    read -rd "" -a flags <<<"--insecure ${STATUS_FLAGS:-}" || true # its certificate need not be of this address
    while ((SECONDS - begin < START_TIMEOUT_S)); do
        check_alive
        is_served=1 # exit status 0: workers are live and the tokenizer is loaded
        seen=$("$PYTHON" -m baton status --url "$url" --brief "${flags[@]}" 2>/dev/null) || is_served=0
        if [[ $seen =~ ^([0-9]+)" prefill, "([0-9]+)" decode"(.*)$ ]]; then
            num_prefill=${BASH_REMATCH[1]} num_decode=${BASH_REMATCH[2]}
            # Others may have workers in the same registry.
            if ((is_served && num_prefill >= $1 && num_decode >= $2)); then
                READY=$seen
                return
            fi
            seen="$num_prefill of $1 prefill, $num_decode of $2 decode ready${BASH_REMATCH[3]}" # ", 1 warming"
        else
            seen="frontend starting; 0 of $1 prefill, 0 of $2 decode ready"
        fi
        if [[ $seen != "$last" ]] || ((SECONDS >= report)); then
            echo "waiting: $seen ($((SECONDS - begin)) s)"
            last=$seen report=$((SECONDS + 30))
        fi
        sleep 0.3
    done
    fail "not ready after $START_TIMEOUT_S s ($seen); logs: $RUN_DIR; to wait longer, set START_TIMEOUT_S"
}

check_alive() { # stops everything if a process has ended
    local pid status
    for pid in "${!NAMES[@]}"; do
        kill -0 "$pid" 2>/dev/null && continue
        status=0; wait "$pid" || status=$?
        died "$pid" "$status" 2>&"$STDERR"
    done
}

serve_until_the_end() { # polls, since `wait -n` misses a process that ended just before the call
    SERVES=1
    [[ -n ${FOLLOW:-} ]] || follow_requests
    { print_ready; while true; do check_alive; sleep 0.3; done; } 2>/dev/null # bash prints a line about each killed job
}

follow_requests() { # prints the frontend's lines about load, slow or failed requests, and the fleet's changes
    local from='(frontend\.access|frontend\.routing\.health)'
    local lines="s/^[^T]*T([0-9:]{8})[^ ]* [A-Z]+ $from /\1 /p; s/^[^T]*T([0-9:]{8}).*\"logger\": \"$from\", /\1 {/p"
    # shellcheck disable=SC2016 # expanded by the inner shell
    local log=$RUN_DIR/frontend.log; local next; next=$(($(wc -l <"$log") + 1))
    setsid bash -c 'tail -n "+$1" -f "$0" | sed -u -n -E "$2"' "$log" "$next" "$lines" &
    FOLLOWERS+=("$!")
}

print_ready() {
    local url; url=$(own_url)
    echo "ready: $url ($READY)"
    [[ ${FRONTEND_FLAGS:-} == *--no-page* ]] || echo "page:  $url/ shows the fleet and has a chat"
    echo "try:   curl -s $url/v1/chat/completions -H 'Content-Type: application/json'" \
        ${BATON_API_KEYS_FILE:+"-H \"Authorization: Bearer \$KEY\""} \
        "-d '{\"model\": \"$SERVED_MODEL_NAME\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'" \
        "| python3 -m json.tool"
}

died() { # died PID STATUS
    local name=${NAMES[$1]}
    unset "NAMES[$1]"
    kill -KILL -- "-$1" 2>/dev/null || true # its children may hold GPUs
    if [[ -n ${RESTART_WORKERS:-} && -n ${SERVES:-} && $name =~ -|^mps$ ]]; then
        if worked "$name"; then FAILURES[$name]=0; else FAILURES[$name]=$((${FAILURES[$name]:-0} + 1)); fi
        if ((FAILURES[$name] < MAX_FAILURES)); then
            echo "$name $(ended "$2"); restarting it (log: $RUN_DIR/$name.log)"
            eval "run $name ${COMMANDS[$name]}"
            return
        fi
        echo "error: $name ended $MAX_FAILURES times in a row before it was ready" >&2
    fi
    stop_following
    local last; last=$(tail -n 1 "$RUN_DIR/$name.log")
    if [[ $last == *error:\ * ]]; then # the process explains its failure
        echo "$name: $last" >&2
    else
        echo "$name $(ended "$2"); its last lines (full log: $RUN_DIR/$name.log):" >&2
        tail -n 15 "$RUN_DIR/$name.log" | sed "s/^/  $name | /" >&2
    fi
    end_all
    exit 1
}

worked() { # worked NAME: it was ready since its last start, or ran for as long as a start may take
    local start_s=$START_TIMEOUT_S
    [[ $1 != mps ]] || start_s=$MPS_START_S # which does not log when it is ready
    ((SECONDS - STARTED[$1] >= start_s)) ||
        [[ -n $(tail -n "+$((${LOGGED[$1]:-0} + 1))" "$RUN_DIR/$1.log" | sed -n -E '/ ready worker=|"message": "ready"/{p; q}') ]]
}

ended() { # ended STATUS, in words
    local name
    if (($1 > 128)) && name=$(kill -l $(($1 - 128)) 2>/dev/null); then echo "was killed by SIG$name"; else echo "exited with status $1"; fi
}

end_all() { # frontend, workers, then etcd and NATS, so that each can finish its requests
    local deadline=$((SECONDS + ${STOP_TIMEOUT_S:-35})) names
    trap 'deadline=0' INT TERM HUP # a second signal kills at once
    for names in frontend '*-*' '*'; do end_those "$names"; done
    stop_following
}

end_those() { # end_those PATTERN; `deadline` is set by end_all
    local pid ending=()
    for pid in "${!NAMES[@]}"; do
        # shellcheck disable=SC2053 # a pattern, not a name
        [[ ${NAMES[$pid]} == $1 ]] || continue
        kill -TERM "$pid" 2>/dev/null || true
        ending+=("$pid")
        unset "NAMES[$pid]"
    done
    for pid in "${ending[@]}"; do
        while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.1 || true; done
        kill -KILL -- "-$pid" 2>/dev/null || true
    done
}

stop_following() {
    local pid
    for pid in "${FOLLOWERS[@]}"; do kill -- "-$pid" 2>/dev/null || true; done
    FOLLOWERS=()
}

interrupted() { # interrupted STATUS
    echo; echo "stopping: running answers finish first; Ctrl-C again stops at once"
    end_all
    exit "${STOP_STATUS:-$1}"
}

fail() { echo "error: $*" >&2; end_all; exit 1; }

trap 'interrupted 130' INT
trap 'interrupted 143' TERM HUP
trap end_all EXIT # whatever ends the script
