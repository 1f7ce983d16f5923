"""UCX, through NIXL: registered memory and one-sided reads. The only file that imports NIXL; see direct.py.

Everything here runs on one thread (NIXL without locks crashes on the second). What was measured, and why it
is used the way it is, stands in docs/decisions.md under "KV transfer".
"""

import contextlib
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from workers.kv.memory import Memory, host_memory

# NIXL reads it when it is imported; its default writes progress reports to stdout.
os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
import nixl_cu13._api as nixl
import nixl_cu13._bindings as nixl_errors

log = logging.getLogger(__name__)

# Over plain TCP, UCX only emulates reads: the source's UCX then aborts the source's process when a reader
# dies, and a read given up goes on writing. Without emulation such a read fails at once, before any byte.
_NO_EMULATION = "PROTO_EMULATION_ENABLE=n"
_LOOPBACK_ONLY = "NET_DEVICES=lo"
_PROBE_BYTES = 4096
_PROBE_LIMIT_S = 2.0
# How long a read that nobody wants any more may take to end by itself.
_GRACE_S = 0.5
_MAX_PEERS = 64

_NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    error for error in vars(nixl_errors).values() if isinstance(error, type) and issubclass(error, Exception)
)
_START_ERRORS: tuple[type[Exception], ...] = (RuntimeError, *_NIXL_ERRORS)


class NoDirectPath(OSError):
    """UCX cannot read that source's memory: not reachable by cma, CUDA IPC or RDMA, or the source is gone."""


class Reach(msgspec.Struct, frozen=True, array_like=True):
    """`Grant.words`: where the payload lies, and NIXL's words for reading there.

    `epoch` changes whenever the agent forgets a registration: what was learnt before is then void.
    """

    agent: str
    epoch: int
    metadata: bytes
    address: int
    device_index: int | None


class Read:
    """One read into `into`. `ended` is set when nobody writes `into` any more: None, or the failure."""

    def __init__(self, reach: Reach, into: Memory) -> None:
        self.reach = reach
        self.into = into
        self.ended: Future[None] = Future()
        self.handle: Any = None
        self.give_up_at = float("inf")

    def end(self, error: Exception | None) -> None:
        """Let go of NIXL's handle and tell who waits."""
        if self.handle is not None:
            with contextlib.suppress(*_NIXL_ERRORS):
                self.handle.release()
            self.handle = None
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class _Agent:
    """One NIXL agent and the memory registered with it, each for as long as its Memory object lives."""

    def __init__(self, ucx_config: str, post: Callable[..., object]) -> None:
        self.name = f"baton-{os.getpid()}-{secrets.token_hex(8)}"
        self.epoch = 0
        self._post = post
        self._regions: dict[weakref.ref[Memory], Any] = {}
        # The agent's own thread would spin on a core; ours polls, and only when there is work.
        config = nixl.nixl_agent_config(backends=[], enable_prog_thread=False)
        self.api: Any = nixl.nixl_agent(self.name, config)
        self.api.create_backend("UCX", {"engine_config": ucx_config})

    def register(self, memory: Memory) -> Any:
        """NIXL's descriptors of the registered whole that `memory` is a part of."""
        whole = memory.whole or memory
        region = self._regions.get(weakref.ref(whole))
        if region is None:
            place = (whole.address, whole.num_bytes, whole.device_index or 0, "")
            region = self.api.register_memory([place], mem_type=_kind(whole.device_index))
            self._regions[weakref.ref(whole, self._on_gone)] = region
        return region

    def close(self) -> None:
        """Free everything. UCX drops what is still under way: afterwards nothing is written any more."""
        self._regions.clear()
        self.api = None

    def _on_gone(self, whole: weakref.ref[Memory]) -> None:
        self._post(self._deregister, whole)

    def _deregister(self, whole: weakref.ref[Memory]) -> None:
        region = self._regions.pop(whole, None)
        if region is not None:
            self.api.deregister_memory(region)
            self.epoch += 1


class Fabric:
    """Lends memory to readers and reads what others lend. Every method runs on the poller's thread.

    Two agents, because the reading one must sometimes be thrown away to stop a read, and the memory that we
    lend, with those who read it, should not notice.
    """

    def __init__(self, host: str, post: Callable[..., object]) -> None:
        """`post(call, *args)` runs a call on this fabric's thread, later."""
        loopback = host == "::1" or host.startswith("127.")
        self._ucx_config = ",".join([_NO_EMULATION, *([_LOOPBACK_ONLY] if loopback else [])])
        self._post = post
        self._num_lent = 0
        self._reads: list[Read] = []
        self._epochs: dict[str, int] = {}

    def open(self) -> bool:
        """Create the agents; True if one can read the other's host memory directly. Raises OSError."""
        try:
            self._source = _Agent(self._ucx_config, self._post)
            self._reader = _Agent(self._ucx_config, self._post)
        except _START_ERRORS as error:
            raise OSError(f"UCX does not start: {error!r}") from error
        payload = host_memory(bytearray(_PROBE_BYTES))
        probe = Read(self.lend(payload), host_memory(bytearray(_PROBE_BYTES)))
        self.begin(probe)
        probe.give_up_at = time.monotonic() + _PROBE_LIMIT_S
        while self.poll() and not probe.ended.done():
            pass
        self.take_back()
        return probe.ended.exception() is None

    def lend(self, payload: Memory) -> Reach:
        """Let peers read `payload` until `take_back`, once for each call. Raises OSError."""
        try:
            region = self._source.register(payload)
            metadata = self._source.api.get_partial_agent_metadata(region, True, ["UCX"])
        except _NIXL_ERRORS as error:
            raise OSError(f"UCX does not register this memory: {error!r}") from error
        self._num_lent += 1
        return Reach(self._source.name, self._source.epoch, metadata, payload.address, payload.device_index)

    def take_back(self) -> None:
        """End of one `lend`."""
        self._num_lent -= 1

    def begin(self, read: Read) -> None:
        """Start a read; `read.ended` tells how it went."""
        self._reads.append(read)
        self._advance(read)

    def give_up(self, read: Read) -> None:
        """Nobody wants this read any more: see that it ends soon."""
        read.give_up_at = min(read.give_up_at, time.monotonic() + _GRACE_S)

    def poll(self) -> bool:
        """Drive what is under way; True if anything is."""
        if self._num_lent:
            with contextlib.suppress(*_NIXL_ERRORS):
                self._source.api.get_new_notifs()  # answers readers that connect
        for read in tuple(self._reads):
            self._advance(read)
        return bool(self._num_lent or self._reads)

    def close(self) -> None:
        """End every read, free the agents."""
        self._drop_reads(ConnectionAbortedError("the transceiver was closed"))
        self._reader.close()
        self._source.close()

    def _advance(self, read: Read) -> None:
        if read.ended.done():
            return  # another read took it along
        try:
            state = self._reader.api.check_xfer_state(read.handle) if read.handle else self._post_read(read)
        except Exception as error:  # noqa: BLE001 whatever NIXL throws, somebody waits for this read to end
            self._end(read, NoDirectPath(f"UCX: {error!r}"))
            self._forget(read.reach.agent)
            return
        if state == "DONE":
            self._end(read, None)
        elif state == "ERR":
            self._end(read, NoDirectPath("UCX: the read failed"))
            self._forget(read.reach.agent)
        elif time.monotonic() > read.give_up_at:
            self._cut_off()

    def _post_read(self, read: Read) -> str:
        """Post the read once the peer's registrations are those of its epoch; gives NIXL's state."""
        reach, api = read.reach, self._reader.api
        if self._epochs.get(reach.agent, reach.epoch) != reach.epoch:
            if any(other.handle and other.reach.agent == reach.agent for other in self._reads):
                return "PROC"  # those reads still use the old ones
            self._forget(reach.agent)
        self._reader.register(read.into)
        api.add_remote_agent(reach.metadata)
        self._epochs[reach.agent] = reach.epoch
        self._limit_peers()
        local = (read.into.address, read.into.num_bytes, read.into.device_index or 0)
        remote = (reach.address, read.into.num_bytes, reach.device_index or 0)
        read.handle = api.initialize_xfer(
            "READ",
            api.get_xfer_descs([local], mem_type=_kind(read.into.device_index)),
            api.get_xfer_descs([remote], mem_type=_kind(reach.device_index)),
            reach.agent,
        )
        state: str = api.transfer(read.handle)
        return state

    def _end(self, read: Read, error: Exception | None) -> None:
        self._reads.remove(read)
        read.end(error)

    def _cut_off(self) -> None:
        """Stop every read now. Neither releasing the handle nor disconnecting would: the agent has to go."""
        log.warning("ucx reads cut off num=%d reason=a source hangs", len(self._reads))
        self._drop_reads(ConnectionAbortedError("a read of this process hung and was cut off"))
        self._reader.close()
        self._reader = _Agent(self._ucx_config, self._post)

    def _drop_reads(self, error: Exception) -> None:
        for read in tuple(self._reads):
            self._end(read, error)
        self._epochs.clear()

    def _forget(self, agent: str) -> None:
        if self._epochs.pop(agent, None) is not None:
            with contextlib.suppress(*_NIXL_ERRORS):
                self._reader.api.remove_remote_agent(agent)

    def _limit_peers(self) -> None:
        """Forget the peer known longest, most likely a process long gone."""
        in_use = {read.reach.agent for read in self._reads}
        if len(self._epochs) > _MAX_PEERS:
            for agent in [name for name in self._epochs if name not in in_use][:1]:
                self._forget(agent)


def _kind(device_index: int | None) -> str:
    return "DRAM" if device_index is None else "VRAM"
