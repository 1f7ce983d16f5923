#!/usr/bin/env bash
# Tests that need GPUs: KV between GPUs, the demo model on CUDA, vLLM's engine contract, and disaggregated vLLM workers
# with half of the GPUs each (one GPU is shared). Results: benchmarks/results/vllm_disagg_*.json.
#   tests/gpu/run.sh [PYTEST_ARGUMENTS]      BATON_GPU_MODELS=20b: the small model only; CUDA_VISIBLE_DEVICES: some GPUs only
#   tests/gpu/run.sh -k one_gpu              launch/gpt_oss_vllm.sh --one-gpu: killed roles, killed MPS
#   BATON_GPU_MPS=1 tests/gpu/run.sh         all tests as clients of one MPS server
# Needs, in the active venv (or $PYTHON's): pip install '.[frontend,vllm]' --group test; etcd and nats-server on the
# PATH; the vocabulary of `make vocab`.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python3}
for program in nvidia-smi etcd nats-server; do
    command -v $program >/dev/null || { echo "$program is not on the PATH" >&2; exit 1; }
done
"$PYTHON" - <<'END'
import sys
from importlib.util import find_spec
missing = [name for name in ("vllm", "nixl", "starlette", "pytest_timeout", "openai") if find_spec(name) is None]
if missing:
    sys.exit(f"{sys.executable} lacks {', '.join(missing)}: pip install '.[frontend,vllm]' --group test")
from tools.fetch_vocab import vocabulary_folder
if vocabulary_folder() is None:
    sys.exit("no vocabulary: run `make vocab`")
END
nvidia-smi --query-gpu=index,name,driver_version,memory.used --format=csv,noheader
if [[ -n ${BATON_GPU_MPS:-} ]]; then
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    env -u CUDA_VISIBLE_DEVICES nvidia-cuda-mps-control -d
    trap 'echo quit -t 5 | nvidia-cuda-mps-control; rm -rf "$CUDA_MPS_PIPE_DIRECTORY"' EXIT
fi
"$PYTHON" -m pytest -m gpu -o addopts= -o pythonpath=. -W default --import-mode=importlib -ra -v --durations=0 tests/gpu "$@"
