"""GPU memory that another process of the host reads: exported by its owner, mapped by its reader."""

import ctypes
import os
import select
from pathlib import Path
from typing import Annotated

import msgspec

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = ctypes.c_uint(1)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


class PeerMemoryError(Exception):
    """The memory cannot be shared; its text says why."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * _HANDLE_BYTES)]


class Exported(msgspec.Struct, frozen=True):
    """What another process needs to map regions of GPU memory. `place` names the host and the namespace in
    which `pid` is the owner's. `allocations`: CUDA's handles. `regions`: each one's allocation and offset."""

    place: str
    pid: int
    allocations: list[Annotated[bytes, msgspec.Meta(min_length=_HANDLE_BYTES, max_length=_HANDLE_BYTES)]]
    regions: list[tuple[int, int]]


def place() -> str:
    """This host's boot and this process's PID namespace."""
    return f"{_BOOT_ID.read_text().strip()} {os.readlink(_PID_NAMESPACE)}"


def export(addresses: list[int]) -> Exported:
    """Let others map the memory at these addresses (CUDA IPC) while it exists. Raises PeerMemoryError."""
    handles: dict[int, bytes] = {}
    regions = []
    for address in addresses:
        base, size, start = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64(address)
        _cuda("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), start)
        if base.value not in handles:
            handle = _Handle()
            _cuda("cuIpcGetMemHandle", ctypes.byref(handle), base)
            handles[base.value] = bytes(handle)
        regions.append((list(handles).index(base.value), address - base.value))
    return Exported(place(), os.getpid(), list(handles.values()), regions)


class PeerMemory:
    """Another process's regions, mapped until `close`; `addresses` are theirs in this process, in order."""

    def __init__(self, exported: Exported) -> None:
        """Raises PeerMemoryError, for example if the owner has ended or runs on another host."""
        if exported.place != place():
            raise PeerMemoryError("the owner runs on another host or in another PID namespace")
        self._mapped: list[int] = []
        try:
            self._owner = os.pidfd_open(exported.pid)
        except OSError as error:
            raise PeerMemoryError(f"the owner has ended: {error}") from error
        try:
            for handle in exported.allocations:
                address, copied = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
                _cuda("cuIpcOpenMemHandle_v2", ctypes.byref(address), copied, _LAZY_PEER_ACCESS)
                self._mapped.append(address.value)
            self.addresses = [self._mapped[index] + offset for index, offset in exported.regions]
        except (PeerMemoryError, IndexError, ValueError) as error:
            self.close()
            raise PeerMemoryError(f"cannot map the owner's memory: {error}") from error

    def is_alive(self) -> bool:
        """Whether the owner runs. Once it has ended, what is in its memory is not to be trusted."""
        owner = select.poll()  # `select` takes no descriptor above 1023
        owner.register(self._owner, select.POLLIN)
        return not owner.poll(0)

    def close(self) -> None:
        """Unmap; nothing may be reading. Idempotent."""
        while self._mapped:
            _cuda("cuIpcCloseMemHandle", ctypes.c_uint64(self._mapped.pop()))
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1


def _cuda(function: str, *arguments: object) -> None:
    """Call the driver, whose context PyTorch has made current. Raises PeerMemoryError."""
    try:
        status = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    except (OSError, AttributeError) as error:
        raise PeerMemoryError(f"{function}: {error}") from error
    if status:
        raise PeerMemoryError(f"{function} failed with CUDA error {status}")
