"""Runs inside vLLM's processes (`worker_extension_cls`): releases pins, kills orphans, patches kernels, and
lets steps go on while a thread reads a long prompt.
"""

import contextlib
import importlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable

from workers.engines.vllm.kernels import pass_strides, reuse_compiled
from workers.engines.vllm.library import SIDE_CHANNEL_PORT, WORKER_PID
from workers.engines.vllm.token_arrays import convert_early

# NIXL checks for notices once per step, and a prefill step may take a second.
NOTICE_S = 2.0
# Another thread hashes the blocks of new prompts; the default lets it keep a step waiting for 5 ms at a time.
SWITCH_INTERVAL_S = 0.0005


class KvPins:
    """vLLM makes this an additional base class of each of its GPU workers."""

    def release_kv(self, request_ids: list[str]) -> list[str]:
        """Free the KV that these finished requests keep for a decode worker, within `NOTICE_S`.

        vLLM itself would wait for the decode worker or for the end of the lease. Returns the ids whose lease
        begins with the next step: ask again for these. Ids that are no longer pinned are ignored.
        """
        transfer = importlib.import_module("vllm.distributed.kv_transfer")
        if not transfer.has_kv_transfer_group():
            return []
        worker = transfer.get_kv_transfer_group().connector_worker
        leases, unfinished = worker._reqs_to_send, worker._reqs_to_process  # noqa: SLF001  no other way
        own_ids = _own_ids(request_ids, unfinished)
        shorten_leases(leases, own_ids.values())
        return [request_id for request_id, own_id in own_ids.items() if own_id not in leases]


def _own_ids(request_ids: list[str], known: Iterable[str]) -> dict[str, str]:
    """vLLM's internal ids of these requests, if known: it appends a dash and eight characters."""
    asked = set(request_ids)
    return {
        request_id: own_id for own_id in known for request_id in (own_id, own_id[:-9]) if request_id in asked
    }


def shorten_leases(leases: dict[str, float], request_ids: Iterable[str]) -> None:
    """End the leases of `request_ids` in `NOTICE_S`: if the KV has moved, the decode worker's notice is on
    its way and frees it first. `leases` is NIXL's: end times by time.perf_counter(), in ascending order.
    """
    end = time.perf_counter() + NOTICE_S
    for request_id in request_ids:
        if request_id in leases:
            leases[request_id] = min(end, leases[request_id])
    in_order = sorted(leases.items(), key=lambda lease: lease[1])
    leases.clear()
    leases.update(in_order)


def _end_with(worker_pid: int, parent_pid: int) -> None:
    """Wait for the end of Baton's worker, then kill this process and its parent, vLLM's core. Otherwise a
    killed worker would leave processes that hold the GPU.
    """
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
    pass_strides()
    reuse_compiled({SIDE_CHANNEL_PORT})
    convert_early()
