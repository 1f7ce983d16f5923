"""vLLM's NIXL connector, with KV copied straight out of a prefill worker's GPU on the same host.

NIXL posts a descriptor for each half of each block of each layer from the engine's own thread, during which
no stream gets a token; here one kernel reads over NVLink while decode goes on. NIXL still introduces the
workers to each other, notifies prefill of what has been read, and moves KV between hosts."""

import dataclasses
import importlib
import logging
import time
from itertools import chain
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from baton.messages import UNDECODABLE
from workers.engines.vllm.patches import NUM_TOKENS
from workers.engines.vllm.patches.peer_memory import Exported, PeerMemory, PeerMemoryError, export

log = logging.getLogger(__name__)

_ANSWER_MS = 5000


class PeerConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Loaded by vLLM through `kv_connector_module_path`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            self.connector_worker = PeerWorker(vllm_config, self.engine_id, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens to read, and that reading takes a while: what the kept KV has beyond what decode
        holds. NIXL's counts the whole prompt, but that may end with a token which prefill sampled."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and params.get(NUM_TOKENS):
            num_lacking = max(0, min(params[NUM_TOKENS], request.num_prompt_tokens) - num_computed_tokens)
            num_lacking *= not self._was_silent(request)
            return num_lacking, num_lacking > 0
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def _was_silent(self, request: Any) -> bool:
        """Whether this process stood still while it held the request: without its heartbeats prefill may have
        freed the KV (`release.KvPins`), so that decode computes it."""
        scheduler, held_s = self.connector_scheduler, time.time() - request.arrival_time
        silent_s = time.perf_counter() - scheduler._last_heartbeat_time  # noqa: SLF001  NIXL's
        return bool(min(silent_s, held_s) > 1 + 1.25 * scheduler._heartbeat_interval)  # noqa: SLF001  NIXL's


@dataclasses.dataclass
class PeerHandshake(NixlHandshakePayload):  # type: ignore[misc]  # as above
    """NIXL's, and the memory of the KV; None if it cannot be shared."""

    memory: Exported | None = None


@dataclasses.dataclass
class Peer:
    """A prefill worker whose memory is mapped. `regions`: ours and its; `agent`: its name in NIXL."""

    memory: PeerMemory
    regions: Any
    agent: str


@dataclasses.dataclass
class _Read:
    peer: Peer
    copy: Any
    notice: bytes


class PeerWorker(NixlPullConnectorWorker):  # type: ignore[misc]  # as above
    """NIXL's worker, which reads what is mapped. Workers are known by engine id and rank."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self._offered: dict[tuple[str, int], tuple[Exported, str]] = {}
        self._peers: dict[tuple[str, int], Peer] = {}
        self._reads: dict[str, _Read] = {}
        super().__init__(vllm_config, engine_id, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """NIXL's, and offer the memory to workers of this host."""
        super().register_kv_caches(kv_caches)
        memory, own = None, self.kv_caches_base_addr[self.engine_id][self.tp_rank]
        try:
            exported = export(own)
            regions = self._regions(own, own, self.block_len_per_layer)
            regions.copy([0], [0])  # compiles the kernel before the first read
            regions.wait()
            memory = exported
        except (PeerMemoryError, ValueError) as error:
            log.warning("KV moves over NIXL, since its memory cannot be shared: %s", error)
        nixls = self.xfer_handshake_metadata
        self.xfer_handshake_metadata: NixlHandshakePayload = PeerHandshake(**vars(nixls), memory=memory)

    def _nixl_handshake(
        self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *more: Any
    ) -> Any:
        """NIXL's, in a thread, and the peer's offer; the engine's thread maps it at the first read."""
        result = super()._nixl_handshake(host, port, remote_tp_size, expected_engine_id, *more)
        agents = result[0] if isinstance(result, tuple) else result  # 0.26 adds the clocks' difference
        for key, agent in agents.items():
            name = key if isinstance(key, tuple) else (key,)  # 0.26: after its pipeline stage, 0 here
            if memory := offered_memory(host, port, name):
                self._offered[expected_engine_id, name[-1]] = memory, agent
        return result

    def _read_blocks(
        self, *, read_spec: Any, dst_engine_id: str, request_id: str, remote_request_id: str, **handles: Any
    ) -> None:
        """Begin to copy what decode lacks; `_pop_done_transfers` says when it has arrived."""
        peer = self._peer(dst_engine_id, read_spec.remote_rank)
        if peer is None or not any(read_spec.local_block_ids):
            asked = {"dst_engine_id": dst_engine_id, "remote_request_id": remote_request_id} | handles
            super()._read_blocks(read_spec=read_spec, request_id=request_id, **asked)
        elif not peer.memory.is_alive():
            self._handle_failed_transfer(request_id, None)
        else:
            remote = self.transfer_topo.get_engine_info(dst_engine_id)
            size = remote.remote_physical_blocks_per_logical
            paired = self._apply_prefix_caching(read_spec.local_block_ids, read_spec.remote_block_ids, size)
            copy = peer.regions.copy(*(list(chain.from_iterable(groups)) for groups in paired))
            notice = f"{remote_request_id}:{self.world_size}".encode()
            self._reads[request_id] = _Read(peer, copy, notice)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> set[str]:
        """The requests whose KV has arrived. Failed ones are noted as NIXL does, which reports them."""
        done: set[str] = super()._pop_done_transfers(transfers)
        for request_id, read in list(self._reads.items()):
            if read.copy.is_done():
                del self._reads[request_id]
                if self._arrived(read):
                    done.add(request_id)
                else:
                    self._handle_failed_transfer(request_id, None)
        for key, peer in list(self._peers.items()):
            is_read = any(read.peer is peer for read in self._reads.values())
            if not is_read and not peer.memory.is_alive():  # unmapped, as its successor needs the memory
                self._peers.pop(key).memory.close()
        return done

    def _arrived(self, read: _Read) -> bool:
        """Whether the prefill worker outlived the copy; if so, notify it that its KV has been read."""
        if not read.peer.memory.is_alive():
            return False
        self.nixl_wrapper.send_notif(read.peer.agent, notif_msg=read.notice)
        size, took_us = read.copy.num_bytes, read.copy.took_us()
        moved = SimpleNamespace(xferDuration=took_us, postDuration=0, totalBytes=size, descCount=1)
        self.xfer_stats.record_transfer(moved)
        return True

    def _peer(self, engine_id: str, rank: int) -> Peer | None:
        """The prefill worker whose memory is mapped; None: its KV moves over NIXL."""
        offered = self._offered.pop((engine_id, rank), None)
        if offered and (engine_id, rank) not in self._peers:  # NIXL forgets who was idle, and asks again
            try:
                self._peers[engine_id, rank] = self._mapped(engine_id, *offered)
                log.info("the KV of %s is read from its GPU's memory, pid %d", engine_id, offered[0].pid)
            except (PeerMemoryError, ValueError) as error:
                log.warning("KV of %s moves over NIXL: %s", engine_id, error)
        return self._peers.get((engine_id, rank))

    def _mapped(self, engine_id: str, offered: Exported, agent: str) -> Peer:
        """Raises PeerMemoryError, ValueError."""
        topology = self.transfer_topo
        remote = topology.get_engine_info(engine_id)
        if topology.tp_ratio(remote.remote_tp_size) != 1 or remote.remote_block_size != self.block_size:
            raise ValueError("its tensor parallelism or its block size differs")
        memory = PeerMemory(offered)
        try:
            own = self.kv_caches_base_addr[self.engine_id][self.tp_rank]
            regions = self._regions(own, memory.addresses, self.block_len_per_layer)
        except ValueError:
            memory.close()
            raise
        return Peer(memory, regions, agent)

    def _regions(self, targets: list[int], sources: list[int], block_bytes: list[int]) -> Any:
        """Raises ValueError."""
        copying = importlib.import_module("workers.engines.vllm.patches.block_copy")  # needs a GPU and Triton
        return copying.Regions(targets, sources, block_bytes)

    def shutdown(self) -> None:
        """Wait for copies, unmap, and shut NIXL down."""
        while self._peers:
            peer = self._peers.popitem()[1]
            peer.regions.wait()
            peer.memory.close()
        super().shutdown()


def offered_memory(host: str, port: int, rank: tuple[int, ...]) -> Exported | None:
    """What this rank of a prefill worker offers on NIXL's side channel, `host` and `port`; None: nothing."""
    zmq = importlib.import_module("zmq")  # vLLM's
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.RCVTIMEO, _ANSWER_MS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)  # too
        socket.connect(f"tcp://{host}:{port}")
        socket.send(msgspec.msgpack.encode((GET_META_MSG, *rank)))
        try:
            return msgspec.msgpack.decode(socket.recv(), type=PeerHandshake).memory
        except (zmq.ZMQError, *UNDECODABLE) as error:
            log.warning("KV of %s:%d moves over NIXL: %s", host, port, error)
            return None
