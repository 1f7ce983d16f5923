"""The worker's half, as far as subclasses see it: regions, engines that it knows, reads and their ends."""

import collections
import itertools
import queue
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload


class NixlPullConnectorWorker:
    """A transfer over NIXL is done when a test puts its handle into `done_handles`."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self.engine_id, self.tp_rank, self.world_size, self.block_size = engine_id, 0, 1, 64
        self.kv_caches_base_addr: dict[str, dict[int, list[int]]] = collections.defaultdict(dict)
        self.block_len_per_layer: list[int] = []
        self.xfer_handshake_metadata: NixlHandshakePayload | None = None
        self._recving_transfers: dict[str, list[int]] = {}
        self._failed_recv_reqs: queue.Queue[str] = queue.Queue()
        self.done_handles: set[int] = set()
        self.failed: list[str] = []
        self.engines: dict[str, Any] = {}
        self.notices: list[tuple[str, bytes]] = []
        self.moved: list[tuple[int, float]] = []
        self.is_shut_down = False
        self.transfer_topo = SimpleNamespace(
            get_engine_info=self.engines.__getitem__, tp_ratio=lambda remote: remote // self.world_size
        )
        self.nixl_wrapper = SimpleNamespace(
            send_notif=lambda agent, notif_msg: self.notices.append((agent, notif_msg))
        )
        self.xfer_stats = SimpleNamespace(
            record_transfer=lambda moved: self.moved.append((moved.totalBytes, moved.xferDuration))
        )

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """`kv_caches`: address and bytes of a block, by layer."""
        self.kv_caches_base_addr[self.engine_id][self.tp_rank] = [a for a, _ in kv_caches.values()]
        self.block_len_per_layer = [num_bytes for _, num_bytes in kv_caches.values()]
        self.xfer_handshake_metadata = NixlHandshakePayload("hash", b"metadata")

    def _nixl_handshake(
        self, host: str, port: int, num_ranks: int, engine_id: str, num_stages: int = 1, _: bool = False
    ) -> Any:
        """The names of that engine's ranks; since 0.26 by stage and rank, with the clocks' difference."""
        if vllm.__version__.startswith("0.25."):
            return {rank: f"{engine_id}-{rank}" for rank in range(num_ranks)}
        ranks = itertools.product(range(num_stages), range(num_ranks))
        return {(stage, rank): f"{engine_id}-{rank}" for stage, rank in ranks}, 0.5

    def _read_blocks(self, *, request_id: str, local_xfer_side_handle: int, **_: Any) -> None:
        self._recving_transfers[request_id] = [len(self._recving_transfers)]

    def _apply_prefix_caching(
        self, local: list[list[int]], remote: list[list[int]], _: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        return local, [theirs[-len(ours) :] for ours, theirs in zip(local, remote, strict=True)]

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> set[str]:
        done = {request_id for request_id, handles in transfers.items() if self.done_handles >= set(handles)}
        for request_id in done:
            del transfers[request_id]
        return done

    def _handle_failed_transfer(self, request_id: str, handle: int | None) -> None:
        assert handle is None
        self.failed.append(request_id)
        self._failed_recv_reqs.put(request_id)

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Requests that were sent, and those whose KV arrived or failed to."""
        done = self._pop_done_transfers(self._recving_transfers)
        while not self._failed_recv_reqs.empty():
            done.add(self._failed_recv_reqs.get())
        return set(), done

    def shutdown(self) -> None:
        """Release everything."""
        self.is_shut_down = True
