"""Contiguous host or CUDA memory, described without torch."""

import ctypes

import msgspec


class Memory(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True):
    """`num_bytes` at `address`, on CUDA device `device_index` or, if None, on the host.

    `owner` owns the bytes (tensor, bytearray) and keeps them mapped. A tensor `t` is
    `Memory(address=t.data_ptr(), num_bytes=t.nbytes, device_index=..., owner=t)`.

    UCX registers memory once per Memory object, until the transceiver closes. So keep the Memory of a staging
    buffer and transfer `part`s of it."""

    address: int
    num_bytes: int
    owner: object
    device_index: int | None = None
    whole: "Memory | None" = None

    def part(self, start: int, num_bytes: int) -> "Memory":
        """`num_bytes` from offset `start`, registered together with the whole. Raises ValueError."""
        if start < 0 or num_bytes < 0 or start + num_bytes > self.num_bytes:
            raise ValueError(f"bytes {start} to {start + num_bytes} are outside of {self.num_bytes}")
        return Memory(
            address=self.address + start,
            num_bytes=num_bytes,
            owner=self.owner,
            device_index=self.device_index,
            whole=self.whole or self,
        )


class NoDirectPath(OSError):
    """UCX cannot read the source's memory: not reachable by cma, CUDA IPC or RDMA, or the source died."""


def host_memory(buffer: bytearray | memoryview) -> Memory:
    """The memory, not copied, of a writable, contiguous buffer that is not empty."""
    first = ctypes.c_char.from_buffer(buffer)  # keeps the whole buffer where it is
    return Memory(address=ctypes.addressof(first), num_bytes=memoryview(buffer).nbytes, owner=first)


def host_view(memory: Memory) -> memoryview:
    """Host memory as writable bytes, not copied, not kept alive. Raises ValueError for CUDA memory."""
    if memory.device_index is not None:
        raise ValueError("this memory is on a CUDA device")
    view: memoryview = _view(memory.address, memory.num_bytes, _WRITABLE)
    return view


# Not through a ctypes array: each size would be a new type, which takes 10 us.
_WRITABLE = 0x200  # PyBUF_WRITE
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object
