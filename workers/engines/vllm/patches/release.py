"""Frees KV that prefill keeps before its lease ends, inside vLLM's processes."""

import importlib
import time
from collections.abc import Iterable

# NIXL checks for notices once per step, and a prefill step may take a second.
NOTICE_S = 2.0


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
    wanted = set(request_ids)
    return {
        request_id: own_id for own_id in known for request_id in (own_id, own_id[:-9]) if request_id in wanted
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
