"""GPU memory that outlives its process: CUDA's virtual memory, exported as descriptors. All functions raise
PeerMemoryError.
"""

import ctypes

from workers.engines.vllm.patches.peer_memory import call_driver

_PINNED = _ON_DEVICE = _DESCRIPTOR = 1  # CUDA's constants
_READ, _READ_AND_WRITE = 1, 3
_ALIGNMENT = 2 << 20


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("unused", ctypes.c_uint64 * 2),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def _call(name: str, *arguments: object) -> None:
    """Integers are passed in 64 bits, whatever their C type."""
    call_driver(name, *(ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments))


def _got(name: str, *arguments: object) -> int:
    """The integer that the call writes to its first argument."""
    result = ctypes.c_uint64()
    _call(name, ctypes.byref(result), *arguments)
    return result.value


def _location() -> _Location:
    return _Location(_ON_DEVICE, _got("cuCtxGetDevice"))


def create(num_bytes: int) -> int:
    """The handle of new memory of the current GPU."""
    return _got("cuMemCreate", num_bytes, ctypes.byref(_Properties(_PINNED, _DESCRIPTOR, _location())), 0)


def exported(handle: int) -> int:
    """A descriptor, with which other processes import the memory; the memory exists as long as it does."""
    return _got("cuMemExportToShareableHandle", handle, _DESCRIPTOR, 0)


def imported(descriptor: int) -> int:
    """The handle of another process's memory."""
    return _got("cuMemImportFromShareableHandle", descriptor, _DESCRIPTOR)


def release(handle: int) -> None:
    """Free the memory, once it is mapped nowhere."""
    _call("cuMemRelease", handle)


def reserve(num_bytes: int) -> int:
    """Addresses without memory."""
    return _got("cuMemAddressReserve", num_bytes, _ALIGNMENT, 0, 0)


def map_at(address: int, num_bytes: int, handle: int) -> None:
    """Put the memory behind reserved addresses."""
    _call("cuMemMap", address, num_bytes, 0, handle, 0)
    _permit(address, num_bytes, _READ_AND_WRITE)


def freeze(address: int, num_bytes: int) -> None:
    """From now on, a kernel of this process that writes there fails."""
    _permit(address, num_bytes, _READ)


def _permit(address: int, num_bytes: int, flags: int) -> None:
    _call("cuMemSetAccess", address, num_bytes, ctypes.byref(_Access(_location(), flags)), 1)


def unmap(address: int, num_bytes: int) -> None:
    """Take the memory away from behind its addresses, which stay reserved."""
    _call("cuMemUnmap", address, num_bytes)


def copy(target: int, source: int, num_bytes: int) -> None:
    """Between addresses of the GPU."""
    _call("cuMemcpyDtoD_v2", target, source, num_bytes)


def wait() -> None:
    """Until the GPU has done all that this process asked for."""
    _call("cuCtxSynchronize")
