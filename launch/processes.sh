# Sourced by the launch scripts: starts processes, waits until they serve, ends all of them with the first.
# Logs lie in $RUN_DIR (a fresh folder under .run/), one file a process. Set before sourcing:
#   DRY_RUN=1       print each command instead of starting it
#   FOLLOW=1        show the logs as they grow, each line with its process's name
#   STOP_STATUS     exit status after Ctrl-C or SIGTERM [128 + signal]
#   STOP_TIMEOUT_S  how long processes may take to end before they are killed [35]
# shellcheck shell=bash

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)) || { echo "error: bash 5.1 or newer is needed" >&2; exit 2; }
RUN_DIR=${RUN_DIR:-$PWD/.run/$(date +%H%M%S)-$$}
[[ -n ${DRY_RUN:-} ]] || mkdir -p "$RUN_DIR"
declare -A NAMES=()
FOLLOWERS=()

start() { # start NAME COMMAND... ; `env VAR=value COMMAND...` gives it variables of its own
    local name=$1; shift
    if [[ -n ${DRY_RUN:-} ]]; then
        echo "$(quoted "$@") &"
        return
    fi
    : >"$RUN_DIR/$name.log"
    # A process group of its own: a Ctrl-C in the terminal reaches this script only, which then ends them in turn.
    setsid "$@" >"$RUN_DIR/$name.log" 2>&1 </dev/null &
    NAMES[$!]=$name
    if [[ -n ${FOLLOW:-} ]]; then
        # shellcheck disable=SC2016 # expanded by the inner shell
        setsid bash -c 'tail -n +1 -f "$0" | sed -u "s/^/$1 | /"' "$RUN_DIR/$name.log" "$name" &
        FOLLOWERS+=("$!")
    fi
}

quoted() { # a command line that can be pasted into a shell
    [[ $1 != env ]] || shift
    local word line=""
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
        line+="$word "
    done
    echo "${line% }"
}

set_variable() { # set_variable NAME VALUE: for all processes
    export "$1=$2"
    [[ -z ${DRY_RUN:-} ]] || echo "export $(quoted "$1=$2")"
}

start_cluster() { # etcd and NATS, where no address is given; they listen when it returns
    local started=() port
    if [[ -z ${ETCD_ENDPOINTS:-} ]]; then
        on_the_path etcd || fail "etcd is not on the PATH: apt-get install etcd-server, or set ETCD_ENDPOINTS"
        port=$(free_port)
        started+=("$port")
        ETCD_ENDPOINTS=http://127.0.0.1:$port
        FOLLOW='' start etcd etcd --data-dir "$RUN_DIR/etcd" --listen-client-urls "$ETCD_ENDPOINTS" \
            --advertise-client-urls "$ETCD_ENDPOINTS" --listen-peer-urls http://127.0.0.1:0 \
            --initial-advertise-peer-urls http://127.0.0.1:0 --initial-cluster default=http://127.0.0.1:0 # it has none
    fi
    if [[ -z ${NATS_SERVER:-} ]]; then
        on_the_path nats-server || fail "nats-server is not on the PATH: apt-get install nats-server, or set NATS_SERVER"
        port=$(free_port)
        started+=("$port")
        NATS_SERVER=nats://127.0.0.1:$port
        FOLLOW='' start nats nats-server --addr 127.0.0.1 --port "$port"
    fi
    set_variable ETCD_ENDPOINTS "$ETCD_ENDPOINTS"
    set_variable NATS_SERVER "$NATS_SERVER"
    set_variable BATON_DISCOVERY_BACKEND etcd
    set_variable BATON_REQUEST_PLANE nats
    [[ -z ${DRY_RUN:-} ]] || return 0
    local deadline=$((SECONDS + START_TIMEOUT_S))
    for port in "${started[@]}"; do
        until listens "$port"; do
            check_alive
            ((SECONDS < deadline)) || fail "etcd and NATS are not up after $START_TIMEOUT_S s; logs: $RUN_DIR"
            sleep 0.1
        done
    done
}

on_the_path() { [[ -n ${DRY_RUN:-} ]] || command -v "$1" >/dev/null; }

free_port() { # below the ephemeral range: no client's socket takes it meanwhile
    local port
    while true; do
        port=$((20000 + SRANDOM % 12000))
        listens "$port" || { echo "$port"; return; }
    done
}

listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; } # listens PORT

wait_until_ready() { # wait_until_ready URL NUM_PREFILL NUM_DECODE
    local begin=$SECONDS tell=0 seen="" last=""
    while ((SECONDS - begin < START_TIMEOUT_S)); do
        check_alive
        seen=$("$PYTHON" -m baton status --url "$1" --brief 2>/dev/null) || seen=${seen:-frontend starting}
        if [[ $seen == "$2 prefill, $3 decode" ]]; then
            echo "ready: $1 ($seen)"
            return
        fi
        if [[ $seen != "$last" ]] || ((SECONDS >= tell)); then
            echo "starting: $seen (of $2 prefill, $3 decode), $((SECONDS - begin)) s"
            last=$seen tell=$((SECONDS + 30))
        fi
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

wait_for_the_end() { # not by `wait -n`: of a process that ended just before, it knows nothing
    while true; do check_alive; sleep 0.3; done
}

died() { # died PID STATUS
    local name=${NAMES[$1]}
    unset "NAMES[$1]"
    kill -KILL -- "-$1" 2>/dev/null || true # its children: they hold GPUs
    stop_following
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

end_all() { # frontend, workers, then etcd and NATS: each still has what it needs to finish its requests
    local deadline=$((SECONDS + ${STOP_TIMEOUT_S:-35})) names
    trap 'deadline=0' INT TERM HUP # asked again: no more patience
    for names in frontend '*-*' '*'; do end_those "$names"; done
    stop_following
}

end_those() { # end_those PATTERN; `deadline` is end_all's
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
    echo; echo "stopping"
    end_all
    exit "${STOP_STATUS:-$1}"
}

fail() { echo "error: $*" >&2; end_all; exit 1; }

trap 'interrupted 130' INT
trap 'interrupted 143' TERM HUP
