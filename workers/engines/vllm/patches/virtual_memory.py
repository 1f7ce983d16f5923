"""GPU memory that outlives its process: CUDA's virtual memory, exported as descriptors."""

import ctypes

from workers.engines.vllm.patches.peer_memory import call_driver

_PINNED = _ON_DEVICE = _DESCRIPTOR = 1  # CUDA's constants
_READ, _READ_AND_WRITE = 1, 3
_ALIGNMENT = 2 << 20


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def _location() -> _Location:
    device = ctypes.c_int()
    call_driver("cuCtxGetDevice", ctypes.byref(device))
    return _Location(_ON_DEVICE, device.value)


def create(num_bytes: int) -> int:
    """The handle of new memory of the current GPU. All functions raise PeerMemoryError."""
    handle = ctypes.c_uint64()
    properties = _Properties(_PINNED, _DESCRIPTOR, _location())
    size = ctypes.c_size_t(num_bytes)
    call_driver("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), ctypes.c_uint64(0))
    return handle.value


def exported(handle: int) -> int:
    """A descriptor, with which other processes import the memory; it exists as long as any has one."""
    descriptor, kind = ctypes.c_int(), ctypes.c_int(_DESCRIPTOR)
    of, no_flags = ctypes.c_uint64(handle), ctypes.c_uint64(0)
    call_driver("cuMemExportToShareableHandle", ctypes.byref(descriptor), of, kind, no_flags)
    return descriptor.value


def imported(descriptor: int) -> int:
    """The handle of another process's memory."""
    handle, kind = ctypes.c_uint64(), ctypes.c_int(_DESCRIPTOR)
    call_driver("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), kind)
    return handle.value


def release(handle: int) -> None:
    """Free the memory, once it is mapped nowhere."""
    call_driver("cuMemRelease", ctypes.c_uint64(handle))


def reserve(num_bytes: int) -> int:
    """Addresses without memory."""
    address, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
    size, alignment = ctypes.c_size_t(num_bytes), ctypes.c_size_t(_ALIGNMENT)
    call_driver("cuMemAddressReserve", ctypes.byref(address), size, alignment, zero, zero)
    return address.value


def map_at(address: int, num_bytes: int, handle: int) -> None:
    """Put the memory behind reserved addresses."""
    where, size, zero = ctypes.c_uint64(address), ctypes.c_size_t(num_bytes), ctypes.c_size_t(0)
    call_driver("cuMemMap", where, size, zero, ctypes.c_uint64(handle), ctypes.c_uint64(0))
    protect(address, num_bytes, is_writable=True)


def protect(address: int, num_bytes: int, *, is_writable: bool) -> None:
    """Allow or forbid writing; a kernel that writes nevertheless ends the process's use of the GPU."""
    access = _Access(_location(), _READ_AND_WRITE if is_writable else _READ)
    where, size = ctypes.c_uint64(address), ctypes.c_size_t(num_bytes)
    call_driver("cuMemSetAccess", where, size, ctypes.byref(access), ctypes.c_size_t(1))


def unmap(address: int, num_bytes: int) -> None:
    """Take the memory away from behind its addresses, which stay reserved."""
    call_driver("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))


def copy(target: int, source: int, num_bytes: int) -> None:
    """Between addresses of the GPU."""
    where, what = ctypes.c_uint64(target), ctypes.c_uint64(source)
    call_driver("cuMemcpyDtoD_v2", where, what, ctypes.c_size_t(num_bytes))
