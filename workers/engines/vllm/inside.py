"""What Baton adds inside vLLM's own processes (`worker_extension_cls`): release of pins, and a common end."""

import contextlib
import importlib
import os
import select
import signal
import threading
from typing import Any

from workers.engines.vllm.library import WORKER_PID


class KvPins:
    """vLLM gives this class to each of its GPU workers as an additional base."""

    def release_kv(self, request_ids: list[str]) -> None:
        """Free the KV that these finished requests keep for a decode worker, with the next engine step.

        vLLM itself would wait for the decode worker or for the end of the lease. Ids that are not pinned
        (any more) are left alone.
        """
        transfer = importlib.import_module("vllm.distributed.kv_transfer")
        if transfer.has_kv_transfer_group():
            expire(transfer.get_kv_transfer_group().connector_worker, request_ids)


def expire(worker: Any, request_ids: list[str]) -> None:
    """Let the leases of `request_ids` be over in NIXL's `worker`, whose dict is in the order of expiry."""
    leases = worker._reqs_to_send  # noqa: SLF001  it has no other way to be told
    over = {request_id: 0.0 for request_id in request_ids if leases.pop(request_id, None) is not None}
    if over:
        rest = dict(leases)
        leases.clear()
        leases.update(over | rest)


def _end_with(worker_pid: int, parent_pid: int) -> None:
    """Wait for the end of Baton's worker, then end this process and vLLM's core above it. Without, a killed
    worker would leave processes that hold the GPU.
    """
    with contextlib.suppress(ProcessLookupError):  # it ended before
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
