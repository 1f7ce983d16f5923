#!/usr/bin/env bash
# Tests that need GPUs: KV between GPUs, the demo model on CUDA, vLLM's engine contract, and disaggregated vLLM workers
# with half of the GPUs each (one GPU is shared). Results: benchmarks/results/vllm_disagg_*.json.
#   tests/gpu/run.sh [PYTEST_ARGUMENTS]      BATON_GPU_MODELS=20b: the small model only; CUDA_VISIBLE_DEVICES: some GPUs only
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
exec "$PYTHON" -m pytest -m gpu -o addopts= -o pythonpath=. -W default --import-mode=importlib -ra -v --durations=0 tests/gpu "$@"
