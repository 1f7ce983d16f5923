# Sourced by the gpt-oss launch scripts. Set in the environment to override:
#   MODEL_PATH SERVED_MODEL_NAME ENGINE START_TIMEOUT_S PYTHON; those at the top of launch/processes.sh
#   ETCD_ENDPOINTS NATS_SERVER  [servers on ports 2379 and 4222, else a folder and TCP]
#   SKIP_DOCTOR=1               [skips `python -m baton doctor`, which stops a start that cannot succeed]
# shellcheck shell=bash

MODEL_PATH=${MODEL_PATH:-/model}
ROUTER_MODE=${ROUTER_MODE:-round-robin}
ENGINE=${ENGINE:-trtllm}
START_TIMEOUT_S=${START_TIMEOUT_S:-1800} # loading weights, tuning kernels and capturing graphs take minutes
STOP_TIMEOUT_S=${STOP_TIMEOUT_S:-100}    # a worker drains for 30 s, its engine may take 60 s
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
FOLLOW=1
PREFILL_ENVIRONMENT=() # NAME=value of prefill workers only

. launch/processes.sh

set_environment() { # set_environment NAME=VALUE..., unless the user has set it
    local pair
    for pair in "$@"; do
        set_variable "${pair%%=*}" "$(printenv "${pair%%=*}" || echo "${pair#*=}")"
    done
}

gpus_each() { # gpus_each LIST NUM_WORKERS: GPUs per worker, its tensor and expert parallel size
    local gpus; IFS=, read -ra gpus <<<"$1"
    if [[ ! $2 =~ ^[1-9][0-9]*$ ]] || ((${#gpus[@]} == 0 || ${#gpus[@]} % $2)); then
        fail "${#gpus[@]} GPUs ($1) cannot be divided evenly among $2 workers"
    fi
    echo $((${#gpus[@]} / $2))
}

shares() { # shares LIST NUM_WORKERS: 0,1,2,3 for two workers is 0,1;2,3
    local gpus each i found=()
    IFS=, read -ra gpus <<<"$1"
    each=$(gpus_each "$1" "$2")
    for ((i = 0; i < $2; i++)); do found+=("$(IFS=,; echo "${gpus[*]:i * each:each}")"); done
    (IFS=';'; echo "${found[*]}")
}

prepare() { # prepare DOCTOR_FLAGS...: environment, registry, request plane, doctor
    if [[ $ENGINE == trtllm ]]; then
        set_environment TRTLLM_ENABLE_PDL=1 TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL=True
        # For KV between processes of one node: UCX detects CUDA memory without its cache, which may be stale.
        set_environment UCX_CUDA_COPY_ASYNC_MEM_TYPE=cuda UCX_CUDA_COPY_DMABUF=no UCX_MEMTYPE_CACHE=n \
            UCX_RNDV_PIPELINE_ERROR_HANDLING=y
    fi
    set_variable HTTP_HOST "$HTTP_HOST"
    join_cluster
    if [[ $ENGINE != mocker && -z ${SKIP_DOCTOR:-} ]]; then
        check_first "$PYTHON" -m baton doctor --engine "$ENGINE" --model-path "$MODEL_PATH" "$@" --http-port "$HTTP_PORT"
    fi
}

join_cluster() { # etcd and NATS if available, else a folder and TCP, as all processes are on one machine
    [[ -n ${ETCD_ENDPOINTS:-} ]] || ! listens 2379 || ETCD_ENDPOINTS=http://127.0.0.1:2379
    [[ -n ${NATS_SERVER:-} ]] || ! listens 4222 || NATS_SERVER=nats://127.0.0.1:4222
    if [[ -n ${ETCD_ENDPOINTS:-} ]]; then
        set_variable ETCD_ENDPOINTS "$ETCD_ENDPOINTS"
        set_environment BATON_DISCOVERY_BACKEND=etcd
    else
        set_environment BATON_DISCOVERY_BACKEND=file BATON_FILE_REGISTRY="$RUN_DIR/registry"
    fi
    if [[ -n ${NATS_SERVER:-} ]]; then
        set_variable NATS_SERVER "$NATS_SERVER"
        set_environment BATON_REQUEST_PLANE=nats
    else
        set_environment BATON_REQUEST_PLANE=tcp
    fi
}

check_first() { # check_first DOCTOR...: fails if it exits with 2 (errors)
    if [[ -n ${DRY_RUN:-} ]]; then
        quoted "$@"
        return
    fi
    local status=0
    "$@" || status=$?
    ((status < 2)) || fail "not started: fix the errors above (or set SKIP_DOCTOR=1)"
}

start_workers() { # start_workers MODE NUM_WORKERS GPUS YAML FLAGS...
    local mode=$1 gpus yaml=$4 i environment=()
    [[ $mode != prefill ]] || environment=("${PREFILL_ENVIRONMENT[@]}")
    IFS=';' read -ra gpus <<<"$(shares "$3" "$2")"
    shift 4
    for ((i = 0; i < ${#gpus[@]}; i++)); do
        start "$mode-$i" env CUDA_VISIBLE_DEVICES="${gpus[i]}" "${environment[@]}" \
            "$PYTHON" -m workers --engine "$ENGINE" --name "$mode-$i" --model-path "$MODEL_PATH" \
            --served-model-name "$SERVED_MODEL_NAME" --extra-engine-args "$yaml" \
            --dyn-reasoning-parser gpt_oss --dyn-tool-call-parser harmony --disaggregation-mode "$mode" "$@"
    done
}

serve() { # serve NUM_PREFILL NUM_DECODE, until Ctrl-C or until a process ends
    [[ -z ${DRY_RUN:-} ]] || exit 0
    wait_until_ready "$1" "$2"
    serve_until_the_end
}
