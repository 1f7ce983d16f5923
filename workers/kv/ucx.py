"""UCX through NIXL: registered memory and one-sided reads. The only file that imports NIXL."""

import contextlib
import os
import queue
import secrets
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec

from workers.kv.memory import Memory, NoDirectPath

# Read at import. By default both print errors for each source that cannot be read directly and each peer that
# ends; our own log has a line for that.
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
import nixl_cu13._api as nixl
import nixl_cu13._bindings as nixl_bindings

# Over plain TCP UCX only emulates reads: when a reader dies in the middle, UCX aborts the source's process
# (measured with UCX 1.23). Without emulation such a read fails at once, unposted.
_NO_EMULATION = "PROTO_EMULATION_ENABLE=n"
# By default UCX reads GPU memory over CUDA IPC only with NVLink.
_CUDA_IPC_READS = "CUDA_IPC_ENABLE_GET_ZCOPY=on"
_LOOPBACK_ONLY = "NET_DEVICES=lo"
_MAX_GONE = 256

_NIXL_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(e for e in vars(nixl_bindings).values() if isinstance(e, type) and issubclass(e, Exception)),
)


class Reach(msgspec.Struct, frozen=True, array_like=True):
    """`KvGrant.way`: the payload's address, and NIXL's descriptors for reading it.

    `epoch` changes when the agent's earlier descriptors for some address became invalid.
    """

    agent: str
    epoch: int
    metadata: bytes
    address: int
    device_index: int | None


class Agent:
    """One NIXL agent and the memory registered with it, each for as long as its Memory object lives.

    Use it from one thread only: NIXL crashes otherwise.
    """

    def __init__(self, host: str) -> None:
        """`host` is this process's address for peers; a loopback address restricts UCX to that device. Raises
        OSError.
        """
        self.name = f"baton-{os.getpid()}-{secrets.token_hex(8)}"
        self.epoch = 0
        self._regions: dict[weakref.ref[Memory], _Region] = {}
        self._gone: list[_Region] = []
        self._unused: queue.SimpleQueue[weakref.ref[Memory]] = queue.SimpleQueue()  # a finalizer may put
        loopback = host == "::1" or host.startswith("127.")
        ucx_config = ",".join([_NO_EMULATION, _CUDA_IPC_READS, *([_LOOPBACK_ONLY] if loopback else [])])
        # The agent's own thread would spin on a core; ours polls only while there is work.
        config = nixl.nixl_agent_config(backends=[], enable_prog_thread=False)
        with _as_os_error("UCX does not start"):
            self._api: Any = nixl.nixl_agent(self.name, config)
            self._api.create_backend("UCX", {"engine_config": ucx_config})

    def reach(self, payload: Memory) -> Reach:
        """Register the whole that `payload` is a part of, once, and return how to read it. Raises OSError."""
        with _as_os_error("UCX cannot register this memory"):
            metadata = self._register(payload.whole or payload)
        return Reach(self.name, self.epoch, metadata, payload.address, payload.device_index)

    def read(self, reach: Reach, into: Memory) -> Any:
        """Post a read of `into.num_bytes`; returns its handle. Raises NoDirectPath."""
        with _as_os_error("UCX cannot read this source", NoDirectPath):
            self._register(into.whole or into)
            self._api.add_remote_agent(reach.metadata)  # once per region; cheap for a known one
            local = self._descs(into.address, into.num_bytes, into.device_index)
            remote = self._descs(reach.address, into.num_bytes, reach.device_index)
            handle = self._api.initialize_xfer("READ", local, remote, reach.agent)
            self._api.transfer(handle)
        return handle

    def is_done(self, handle: Any) -> bool:
        """Advance a read; True when every byte has arrived. Raises NoDirectPath if it failed."""
        with _as_os_error("UCX lost the source", NoDirectPath):
            state = self._api.check_xfer_state(handle)
        if state == "ERR":
            raise NoDirectPath("UCX: the read failed")
        return bool(state == "DONE")

    def release(self, handle: Any) -> None:
        """Free a read's handle. This does not stop a running read; only `close` does."""
        with contextlib.suppress(*_NIXL_ERRORS):
            handle.release()

    def progress(self) -> None:
        """Answer connecting readers; their reads need nothing else from this side."""
        with contextlib.suppress(*_NIXL_ERRORS):
            self._api.get_new_notifs()

    def close(self) -> None:
        """Free everything, handles first. Running reads are dropped and write no more."""
        self._regions.clear()
        self._api = None

    def _register(self, whole: Memory) -> bytes:
        self._deregister_unused()
        region = self._regions.get(weakref.ref(whole))
        if region is None:
            region = self._new_region(whole)
            self._regions[weakref.ref(whole, self._unused.put)] = region
        return region.metadata

    def _new_region(self, whole: Memory) -> "_Region":
        device = whole.device_index or 0
        place = (whole.address, whole.num_bytes, device, "")
        descs = self._api.register_memory([place], mem_type=_kind(whole.device_index))
        metadata: bytes = self._api.get_partial_agent_metadata(descs, True, ["UCX"])
        region = _Region((device, whole.address, whole.num_bytes), descs, metadata)
        if len(self._gone) > _MAX_GONE or any(region.contradicts(gone) for gone in self._gone):
            self._gone.clear()
            self.epoch += 1
        return region

    def _deregister_unused(self) -> None:
        while not self._unused.empty():
            if region := self._regions.pop(self._unused.get(), None):
                self._api.deregister_memory(region.descs)
                self._gone.append(region)

    def _descs(self, address: int, num_bytes: int, device_index: int | None) -> Any:
        return self._api.get_xfer_descs([(address, num_bytes, device_index or 0)], _kind(device_index))


class _Region:
    """One registration: its span (device, address, bytes), NIXL's handle, and the descriptors for peers."""

    def __init__(self, span: tuple[int, int, int], descs: Any, metadata: bytes) -> None:
        self.span = span
        self.descs = descs
        self.metadata = metadata

    def contradicts(self, gone: "_Region") -> bool:
        """Whether a peer that still holds `gone` could mistake its descriptors for this region's."""
        device, address, num_bytes = self.span
        gone_device, gone_address, gone_num_bytes = gone.span
        overlap = address < gone_address + gone_num_bytes and gone_address < address + num_bytes
        return device == gone_device and overlap and self.metadata != gone.metadata


def _kind(device_index: int | None) -> str:
    return "DRAM" if device_index is None else "VRAM"


@contextlib.contextmanager
def _as_os_error(what: str, kind: type[OSError] = OSError) -> Iterator[None]:
    try:
        yield
    except _NIXL_ERRORS as error:
        raise kind(f"{what}: {error!r}") from error
