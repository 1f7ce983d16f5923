"""Runs inside vLLM's processes (`worker_extension_cls`): applies patches, kills orphans, and lets steps go
on while a thread reads a long prompt."""

import contextlib
import importlib
import os
import select
import signal
import sys
import threading

from workers.engines.vllm.library import SIDE_CHANNEL_PORT, WORKER_PID
from workers.engines.vllm.patches import COMPILED, DRAWS, STRIDES, is_on
from workers.engines.vllm.patches.draws import pass_draws
from workers.engines.vllm.patches.kernels import pass_strides, reuse_compiled
from workers.engines.vllm.patches.release import KvPins
from workers.engines.vllm.settings import SECOND_RUNNER

__all__ = ["KvPins"]

# Another thread hashes the blocks of new prompts; the default lets it keep a step waiting for 5 ms at a time.
SWITCH_INTERVAL_S = 0.0005


def _end_with(worker_pid: int, parent_pid: int) -> None:
    """Wait for the end of Baton's worker, then kill this process and its parent, vLLM's core. Otherwise a
    killed worker would leave processes that hold the GPU."""
    with contextlib.suppress(ProcessLookupError):  # it has already ended
        select.select([os.pidfd_open(worker_pid)], [], [])
    if parent_pid not in {worker_pid, 1} and os.getppid() == parent_pid:
        os.kill(parent_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if WORKER_PID in os.environ and os.environ[WORKER_PID] != str(os.getpid()):
    threading.Thread(
        target=_end_with,
        args=(int(os.environ[WORKER_PID]), os.getppid()),
        daemon=True,
        name="end-with-worker",
    ).start()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    version: str = importlib.import_module("vllm").__version__
    if is_on(STRIDES, version):
        pass_strides()
    if is_on(COMPILED, version):
        reuse_compiled(SIDE_CHANNEL_PORT)
    if is_on(DRAWS, version) and os.environ.get(SECOND_RUNNER) == "1":
        pass_draws()
