"""The host's memory in the place of `patches.virtual_memory`: handles are memfds, mapped as CUDA would."""

import ctypes
import mmap
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FIXED, _NO_RESERVE = 0x10, 0x4000
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE


def create(num_bytes: int) -> int:
    """See `virtual_memory`, as all of these."""
    handle = os.memfd_create("gpu")
    os.ftruncate(handle, num_bytes)
    return handle


exported = imported = os.dup
release = os.close


def reserve(num_bytes: int) -> int:
    """Any read or write there ends the process."""
    address: int = _LIBC.mmap(None, num_bytes, 0, _RESERVED, -1, 0)
    return address


def map_at(address: int, num_bytes: int, handle: int) -> None:
    """Of the file's beginning."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    assert _LIBC.mmap(address, num_bytes, protection, mmap.MAP_SHARED | _FIXED, handle, 0) == address


def unmap(address: int, num_bytes: int) -> None:
    """Reserved again."""
    assert _LIBC.mmap(address, num_bytes, 0, _RESERVED | _FIXED, -1, 0) == address


def freeze(address: int, num_bytes: int) -> None:
    """A write ends the process."""
    assert not _LIBC.mprotect(address, num_bytes, mmap.PROT_READ)


def copy(target: int, source: int, num_bytes: int) -> None:
    """At once."""
    ctypes.memmove(target, source, num_bytes)


def wait() -> None:
    """Nothing is pending."""
