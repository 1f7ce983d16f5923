"""A contiguous piece of host or CUDA memory, described without torch."""

import ctypes

import msgspec


class Memory(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True):
    """`num_bytes` at `address`; on the CUDA device `device_index`, or on the host if that is None.

    `owner` is the object that owns the bytes (tensor, bytearray): while somebody holds it they stay mapped.
    A tensor `t` is `Memory(address=t.data_ptr(), num_bytes=t.nbytes, device_index=..., owner=t)`.

    A wire that must register memory does it once for each Memory object and keeps that until the object is
    gone. So hold on to the Memory of a staging buffer and move `part`s of it.
    """

    address: int
    num_bytes: int
    owner: object
    device_index: int | None = None
    whole: "Memory | None" = None

    def part(self, start: int, num_bytes: int) -> "Memory":
        """`num_bytes` from offset `start` on, registered together with the whole. Raises ValueError."""
        if start < 0 or num_bytes < 0 or start + num_bytes > self.num_bytes:
            raise ValueError(f"bytes {start} to {start + num_bytes} of {self.num_bytes}")
        return Memory(
            address=self.address + start,
            num_bytes=num_bytes,
            owner=self.owner,
            device_index=self.device_index,
            whole=self.whole or self,
        )


def host_memory(buffer: bytearray | memoryview) -> Memory:
    """The bytes of a writable, contiguous buffer, not copied; else raises TypeError or ValueError."""
    array = (ctypes.c_char * memoryview(buffer).nbytes).from_buffer(buffer)
    return Memory(address=ctypes.addressof(array), num_bytes=ctypes.sizeof(array), owner=array)


def host_view(memory: Memory) -> memoryview:
    """Host memory as writable bytes, not copied, not kept alive. Raises ValueError on CUDA memory."""
    if memory.device_index is not None:
        raise ValueError("these bytes live on a CUDA device")
    return memoryview((ctypes.c_char * memory.num_bytes).from_address(memory.address)).cast("B")
