# Sourced by gpt_oss_vllm.sh --one-gpu: prefill and decode on one GPU, as clients of an MPS server where that runs.
#   CUDA_MPS_PIPE_DIRECTORY  names an MPS that runs already; it is used, and not stopped
#   NO_MPS=1                 none: the roles take turns on the GPU, in time slices of the driver
#   PREFILL_MPS_PRIORITY=0   prefill's kernels are equal to decode's [1: they come after those that wait]
# shellcheck shell=bash

MPS_START_S=${MPS_START_S:-10}

divide_gpu() { # divide_gpu GPU: sets PREFILL_FLAGS and DECODE_FLAGS, with each role's part of the memory
    local lines share
    [[ $ENGINE == vllm ]] || return 0 # whose settings these are
    lines=$("$PYTHON" -m baton shares --model-path "$MODEL_PATH" --gpu "$1" \
        --prefill-flags="$PREFILL_FLAGS ${PREFILL_EXTRA_FLAGS:-}" --decode-flags="$DECODE_FLAGS ${DECODE_EXTRA_FLAGS:-}" \
        --decode-engine-args "$DECODE_ENGINE_ARGS") || exit 1
    { read -r PREFILL_FLAGS; read -r DECODE_FLAGS; read -r share || true; } <<<"$lines"
    # PyTorch keeps what it has freed: memory that one role used to load would be missing when the other takes its KV.
    [[ -z $share || -n ${PYTORCH_CUDA_ALLOC_CONF:-}${PYTORCH_ALLOC_CONF:-} ]] ||
        set_variable PYTORCH_CUDA_ALLOC_CONF "per_process_memory_fraction:$share"
    PREFILL_EXTRA_FLAGS="" DECODE_EXTRA_FLAGS=""
}

start_mps() { # start_mps GPU PERCENT: prefill gets at most PERCENT of the GPU's SMs; without MPS the roles take turns
    local pid others uuid="" sms=all
    unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE # it would limit decode, and with the server each client
    if [[ -n ${NO_MPS:-} ]]; then
        take_turns "NO_MPS is set"
        return
    fi
    PREFILL_ENVIRONMENT=(CUDA_MPS_CLIENT_PRIORITY="${PREFILL_MPS_PRIORITY:-1}")
    (($2 == 100)) || { PREFILL_ENVIRONMENT+=(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="$2"); sms="at most $2 %"; }
    if [[ -n ${CUDA_MPS_PIPE_DIRECTORY:-} ]]; then
        note "the MPS of $CUDA_MPS_PIPE_DIRECTORY, prefill on $sms of the SMs"
        return
    fi
    others=$(timeout 20 nvidia-smi --id="$1" --query-compute-apps=name --format=csv,noheader 2>/dev/null) || others=""
    if [[ $others == *nvidia-cuda-mps-server* ]]; then
        take_turns "GPU $1 has the MPS server of another stack or user; to use it, set CUDA_MPS_PIPE_DIRECTORY"
        return
    fi
    if ! command -v nvidia-cuda-mps-control >/dev/null; then
        take_turns "nvidia-cuda-mps-control is not on the PATH"
        return
    fi
    if [[ $(uuids) == *$'\n'* ]] && uuid=$(uuids --id="$1") && [[ -n $uuid ]]; then # other GPUs may have an MPS of their own
        # shellcheck disable=SC2034 # of start_workers
        PREFILL_CUDA_VISIBLE_DEVICES=$uuid DECODE_CUDA_VISIBLE_DEVICES=$uuid
    fi
    set_variable CUDA_MPS_PIPE_DIRECTORY "$RUN_DIR/mps"
    set_variable CUDA_MPS_LOG_DIRECTORY "$RUN_DIR/mps"
    set_variable CUDA_MPS_ACTIVE_THREAD_PERCENTAGE 100 # no limit, so workers have no share to check
    if [[ -n ${DRY_RUN:-} ]]; then quoted mkdir -p "$RUN_DIR/mps"; else mkdir -p "$RUN_DIR/mps"; fi
    # By its UUID, since MPS numbers the GPUs of CUDA_VISIBLE_DEVICES anew. SIGTERM ends its server as well.
    start mps env CUDA_VISIBLE_DEVICES="$uuid" bash -c '
[[ -n $CUDA_VISIBLE_DEVICES ]] || unset CUDA_VISIBLE_DEVICES
trap "echo quit -t 5 | timeout 10 nvidia-cuda-mps-control || kill -KILL \$!" TERM
nvidia-cuda-mps-control -f & wait $!; status=$?; wait; exit $status'
    [[ -z ${DRY_RUN:-} ]] || return 0
    for pid in "${!NAMES[@]}"; do [[ ${NAMES[$pid]} != mps ]] || break; done
    if mps_serves "$pid"; then
        note "MPS, prefill on $sms of the SMs"
        return
    fi
    unset "NAMES[$pid]"
    { kill -KILL -- "-$pid"; wait "$pid"; } 2>/dev/null || true
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
    take_turns "MPS does not start (log: $RUN_DIR/mps.log)"
}

uuids() { timeout 20 nvidia-smi "$@" --query-gpu=uuid --format=csv,noheader 2>/dev/null; } # of the host's GPUs, or of one

mps_serves() { # mps_serves PID: starts the server of this user, so that a driver without MPS shows before workers load
    local deadline=$((SECONDS + MPS_START_S)) is_asked="" found
    while ((SECONDS < deadline)) && kill -0 "$1" 2>/dev/null; do
        if found=$(mps get_server_list) && [[ $found =~ [0-9] ]]; then return 0; fi
        [[ -n $is_asked ]] || ! mps "start_server -uid $UID" >/dev/null || is_asked=1
        sleep 0.2
    done
    return 1
}

mps() { timeout 5 nvidia-cuda-mps-control <<<"$1" 2>/dev/null; }

take_turns() { # take_turns WHY
    # shellcheck disable=SC2034 # of start_workers
    PREFILL_ENVIRONMENT=()
    # CUDA would join an MPS in its default folder, and wait until the clients of another user have ended.
    set_variable CUDA_MPS_PIPE_DIRECTORY "$RUN_DIR/no-mps"
    note "time slices, without a limit for prefill: $1"
}

note() { echo "${DRY_RUN:+# }one GPU: $*"; } # a comment in a dry run
