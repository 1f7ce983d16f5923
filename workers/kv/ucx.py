"""UCX through NIXL: registered memory and one-sided reads. The only file that imports NIXL."""

import contextlib
import os
import secrets
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

_NIXL_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(e for e in vars(nixl_bindings).values() if isinstance(e, type) and issubclass(e, Exception)),
)


class Reach(msgspec.Struct, frozen=True, array_like=True):
    """`KvGrant.payload` over UCX: the payload's address, and NIXL's descriptors for reading it."""

    agent: str
    metadata: bytes
    address: int
    device_index: int | None


class Agent:
    """One NIXL agent and the memory registered with it, which stays mapped and registered until `close`: a
    peer that holds descriptors of freed memory would read what comes in its place.

    Use it from one thread only: NIXL crashes otherwise."""

    def __init__(self, host: str) -> None:
        """`host` is this process's address for peers; a loopback address restricts UCX to that device. Raises
        OSError."""
        self.name = f"baton-{os.getpid()}-{secrets.token_hex(8)}"
        self._metadata: dict[Memory, bytes] = {}  # NIXL's descriptors of each registered memory
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
        return Reach(self.name, metadata, payload.address, payload.device_index)

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
        self._metadata.clear()
        self._api = None

    def _register(self, whole: Memory) -> bytes:
        if whole not in self._metadata:
            place = (whole.address, whole.num_bytes, whole.device_index or 0, "")
            descs = self._api.register_memory([place], mem_type=_kind(whole.device_index))
            self._metadata[whole] = self._api.get_partial_agent_metadata(descs, True, ["UCX"])
        return self._metadata[whole]

    def _descs(self, address: int, num_bytes: int, device_index: int | None) -> Any:
        return self._api.get_xfer_descs([(address, num_bytes, device_index or 0)], _kind(device_index))


def _kind(device_index: int | None) -> str:
    return "DRAM" if device_index is None else "VRAM"


@contextlib.contextmanager
def _as_os_error(what: str, kind: type[OSError] = OSError) -> Iterator[None]:
    try:
        yield
    except _NIXL_ERRORS as error:
        raise kind(f"{what}: {error!r}") from error
