#!/usr/bin/env bash
# What only GPUs can show: KV moved between GPUs, the demo model on CUDA, vLLM under the engine contract, and its
# workers with prefill and decode on half of the GPUs each (on one GPU they share it). Results: benchmarks/results/vllm_disagg_*.json.
#   tests/gpu/run.sh [PYTEST_ARGUMENTS]      BATON_GPU_MODELS=20b for the small shape only
# Needs Baton's extras frontend, embedded and vllm and its group test in $PYTHON, etcd and nats-server on the PATH, and
# the vocabulary that `make vocab` makes.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
nvidia-smi --query-gpu=index,name,driver_version,memory.used --format=csv,noheader
exec "$PYTHON" -m pytest -m gpu -o addopts= -o pythonpath=. --import-mode=importlib -ra -v --durations=0 tests/gpu "$@"
