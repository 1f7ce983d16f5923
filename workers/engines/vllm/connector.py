"""vLLM's NIXL connector, with KV copied straight out of a prefill worker's GPU on the same host.

NIXL posts a descriptor for each half of each block of each layer from the engine's own thread, during which
no stream gets a token; here one kernel reads over NVLink while decode goes on. NIXL still introduces the
workers to each other, tells prefill what has been read, and moves KV between hosts.
"""

import dataclasses
import logging
from itertools import chain
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from workers.engines.vllm.block_copy import Regions
from workers.engines.vllm.peer_memory import Exported, PeerMemory, PeerMemoryError, export

log = logging.getLogger(__name__)

_ANSWER_MS = 5000


class PeerConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Loaded by vLLM through `kv_connector_module_path`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            self.connector_worker = PeerWorker(vllm_config, self.engine_id, kv_cache_config)


@dataclasses.dataclass
class PeerHandshake(NixlHandshakePayload):  # type: ignore[misc]  # as above
    """NIXL's, and the memory of the KV; None if it cannot be shared."""

    memory: Exported | None = None


@dataclasses.dataclass
class _Peer:
    memory: PeerMemory
    regions: Regions
    agent: str


@dataclasses.dataclass
class _Copy:
    peer: _Peer
    notice: bytes
    num_bytes: int
    began: torch.cuda.Event
    ended: torch.cuda.Event


class PeerWorker(NixlPullConnectorWorker):  # type: ignore[misc]  # as above
    """NIXL's worker; `_peers` are the prefill workers whose memory is mapped, by engine id and rank."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._offered: dict[tuple[str, int], Exported] = {}
        self._copies: dict[str, _Copy] = {}
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._stream: torch.cuda.Stream | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """NIXL's, and offer the memory to workers of this host."""
        super().register_kv_caches(kv_caches)
        memory = None
        try:
            memory = export(self.kv_caches_base_addr[self.engine_id][self.tp_rank])
        except PeerMemoryError as error:
            log.warning("KV moves over NIXL, since its memory cannot be shared: %s", error)
        told = self.xfer_handshake_metadata
        self.xfer_handshake_metadata = PeerHandshake(
            told.compatibility_hash, told.agent_metadata_bytes, memory
        )

    def _nixl_handshake(
        self, host: str, port: int, remote_tp_size: int, expected_engine_id: str
    ) -> dict[int, str]:
        """NIXL's, in a thread, and the peer's offer; the engine's thread maps it at the first pull."""
        agents: dict[int, str] = super()._nixl_handshake(host, port, remote_tp_size, expected_engine_id)
        for rank in agents:
            if memory := offered_memory(host, port, rank):
                self._offered[expected_engine_id, rank] = memory
        return agents

    def _read_blocks(  # noqa: PLR0917  NIXL's
        self,
        read_spec: Any,
        dst_engine_id: str,
        request_id: str,
        remote_request_id: str,
        local_xfer_side_handle: int,
        remote_xfer_side_handle: int,
    ) -> None:
        """Begin to copy what decode lacks; done when `_pop_done_transfers` says so."""
        peer = self._peer(dst_engine_id, read_spec.remote_rank)
        if peer is None or not any(read_spec.local_block_ids):
            super()._read_blocks(
                read_spec,
                dst_engine_id,
                request_id,
                remote_request_id,
                local_xfer_side_handle,
                remote_xfer_side_handle,
            )
            return
        if not peer.memory.is_alive():
            self._handle_failed_transfer(request_id, None)
            return
        told = self.transfer_topo.get_engine_info(dst_engine_id)
        to_blocks, from_blocks = self._apply_prefix_caching(
            read_spec.local_block_ids, read_spec.remote_block_ids, told.remote_physical_blocks_per_logical
        )
        blocks = [list(chain.from_iterable(groups)) for groups in (to_blocks, from_blocks)]
        notice = f"{remote_request_id}:{self.world_size}".encode()
        self._copies[request_id] = self._copy(peer, *blocks, notice)

    def _copy(self, peer: _Peer, to_blocks: list[int], from_blocks: list[int], notice: bytes) -> _Copy:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(torch.cuda.current_stream())  # steps that still use the blocks
        with torch.cuda.stream(self._stream):
            began.record()
            peer.regions.copy(to_blocks, from_blocks)
            ended.record()
        return _Copy(peer, notice, peer.regions.bytes_per_block * len(to_blocks), began, ended)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> set[str]:
        """The requests whose KV has arrived; failed ones are noted as NIXL notes them."""
        done: set[str] = super()._pop_done_transfers(transfers)
        for request_id, copy in list(self._copies.items()):
            if copy.ended.query():
                del self._copies[request_id]
                if self._is_good(copy):
                    done.add(request_id)
                else:
                    self._handle_failed_transfer(request_id, None)
        return done

    def _is_good(self, copy: _Copy) -> bool:
        """Whether the prefill worker outlived the copy; if so, tell it that its KV has been read."""
        if not copy.peer.memory.is_alive():
            log.warning("a prefill worker ended while its KV was read")
            return False
        self.nixl_wrapper.send_notif(copy.peer.agent, notif_msg=copy.notice)
        took_us = copy.began.elapsed_time(copy.ended) * 1000
        self.xfer_stats.record_transfer(
            SimpleNamespace(xferDuration=took_us, postDuration=0, totalBytes=copy.num_bytes, descCount=1)
        )
        return True

    def _peer(self, engine_id: str, rank: int) -> _Peer | None:
        """The mapped memory of that prefill worker; None: its KV moves over NIXL."""
        key = (engine_id, rank)
        if offered := self._offered.pop(key, None):
            self._forget_ended()
            try:
                self._peers[key] = self._map(offered, engine_id, rank)
            except (PeerMemoryError, ValueError) as error:
                log.warning("KV of %s moves over NIXL: %s", engine_id, error)
        return self._peers.get(key)

    def _map(self, offered: Exported, engine_id: str, rank: int) -> _Peer:
        """Raises PeerMemoryError, ValueError."""
        told, topology = self.transfer_topo.get_engine_info(engine_id), self.transfer_topo
        if topology.tp_ratio(told.remote_tp_size) != 1 or told.remote_block_size != self.block_size:
            raise ValueError("its tensor parallelism or its block size differs")
        memory = PeerMemory(offered)
        own = self.kv_caches_base_addr[self.engine_id][self.tp_rank]
        try:
            regions = Regions(own, memory.addresses, self.block_len_per_layer)
        except ValueError:
            memory.close()
            raise
        log.info("reads the KV of %s from its GPU's memory, pid %d", engine_id, offered.pid)
        return _Peer(memory, regions, self._remote_agents[engine_id][rank])

    def _forget_ended(self) -> None:
        """Unmap the memory of processes that have ended and are not being read."""
        read = {id(copy.peer) for copy in self._copies.values()}
        for key, peer in list(self._peers.items()):
            if id(peer) not in read and not peer.memory.is_alive():
                self._peers.pop(key).memory.close()

    def shutdown(self) -> None:
        """Wait for copies, unmap, and shut NIXL down."""
        if self._stream is not None:
            self._stream.synchronize()
        for peer in self._peers.values():
            peer.memory.close()
        self._peers.clear()
        super().shutdown()


def offered_memory(host: str, port: int, rank: int) -> Exported | None:
    """What the prefill worker offers over NIXL's side channel. None if it offers none."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.RCVTIMEO, _ANSWER_MS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://{host}:{port}")
        socket.send(msgspec.msgpack.encode((GET_META_MSG, rank)))
        try:
            return msgspec.msgpack.decode(socket.recv(), type=PeerHandshake).memory
        except (zmq.ZMQError, msgspec.DecodeError) as error:
            log.warning("KV of %s:%d moves over NIXL: %s", host, port, error)
            return None
