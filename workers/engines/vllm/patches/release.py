"""Frees KV that prefill keeps before its lease ends, inside vLLM's processes."""

import importlib
import time

# NIXL checks for notices once per step, and a prefill step may take a second.
NOTICE_S = 2.0
# The time between two heartbeats of a decode worker, which keep the KV of its queue, in NIXL's extensions.
_HEARTBEATS = 1 / 4


class KvPins:
    """vLLM makes this an additional base class of each of its GPU workers."""

    def release_kv(self, request_ids: list[str]) -> list[str]:
        """Free the KV that these finished requests keep for a decode worker, unless one still has them in its
        queue, as one that has lost the frontend may: within a heartbeat and a half and `NOTICE_S`.

        vLLM itself would wait for the decode worker or for the end of the lease. Returns the ids whose lease
        begins with the next step: ask again for these. Ids that are no longer pinned are ignored."""
        transfer = importlib.import_module("vllm.distributed.kv_transfer")
        if not transfer.has_kv_transfer_group():
            return []
        worker = transfer.get_kv_transfer_group().connector_worker
        leases, unfinished = worker._reqs_to_send, worker._reqs_to_process  # noqa: SLF001  no other way
        hold_s = NOTICE_S + 1.5 * _HEARTBEATS * worker._lease_extension  # noqa: SLF001  as above
        end = time.perf_counter() + hold_s  # if the KV has moved, decode's notice frees it first
        again, wanted = [], set(request_ids)
        for own_id in unfinished:
            # vLLM appends a dash and eight characters.
            request_id = next((known for known in (own_id, own_id[:-9]) if known in wanted), None)
            if request_id is not None and own_id in leases:
                leases[own_id] = min(end, leases[own_id])
            elif request_id is not None:
                again.append(request_id)
        in_order = sorted(leases.items(), key=lambda lease: lease[1])  # as NIXL expects
        leases.clear()
        leases.update(in_order)
        return again
