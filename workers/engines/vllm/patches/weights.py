"""One copy of the weights for the vLLM processes of a GPU, in memory that `weights_holder` keeps.

The first process loads as usual, into memory that it exports. Each other one lets vLLM allocate and process
the same tensors in the same order, but behind all addresses there is one small piece of memory, again and
again, and nothing is loaded. Then the first one's memory takes that piece's place. From then on none can
write to it. Small allocations are copied instead: layers may keep their state in them.
"""

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import msgspec
import torch

from workers.engines.vllm.patches import virtual_memory as memory
from workers.engines.vllm.patches.peer_memory import PeerMemoryError
from workers.engines.vllm.weights_holder import LOADS, receive, send

log = logging.getLogger(__name__)

_GRANULARITY = 2 << 20
_SHARED_FROM = 4 << 20  # PyTorch's small allocations come in pieces of 2 MiB
_SCRATCH_BYTES = 64 << 20
_TIMEOUT_S = 1800.0
_LOADING = "vllm.model_executor.model_loader.base_loader"


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor of the model is."""

    name: str
    segment: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True):
    """Sizes of all segments in the order of their allocation, and which of them are in use at the end."""

    sizes: list[int]
    used: list[int]
    tensors: list[Tensor]


@dataclasses.dataclass
class _Segment:
    """Addresses, and the handles behind them from the first address on, each with its size."""

    address: int
    num_bytes: int
    pieces: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def fill(self, handle: int, num_bytes: int) -> None:
        """Map a handle behind the next addresses."""
        start = self.address + sum(size for _, size in self.pieces)
        memory.map_at(start, num_bytes, handle)
        self.pieces.append((handle, num_bytes))

    def clear(self) -> None:
        """Unmap all; the addresses stay."""
        start = self.address
        for _, size in self.pieces:
            memory.unmap(start, size)
            start += size
        self.pieces.clear()


class Pool:
    """Memory of PyTorch's allocator, in segments that are known by their order."""

    def __init__(self, *, is_real: bool) -> None:
        """Without `is_real` large segments have only a scratch behind them."""
        self.segments: list[_Segment] = []
        self._scratch = 0 if is_real else memory.create(_SCRATCH_BYTES)
        # PyTorch calls these until the process ends; none of them may be destroyed before.
        allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
            self._allocate
        )
        free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
            self._free
        )
        addresses = [ctypes.cast(call, ctypes.c_void_p).value or 0 for call in (allocate, free)]
        allocator = torch._C._cuda_customAllocator(*addresses)  # noqa: SLF001  as its class does
        self._pool = torch.cuda.MemPool(allocator)
        for kept in (allocate, free, allocator, self._pool):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def wraps(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with what it allocates from this pool, and freed in the same order each time."""

        def pooled(*args: Any, **kwargs: Any) -> Any:
            gc.collect()
            gc.disable()
            try:
                with torch.cuda.use_mem_pool(self._pool):
                    return function(*args, **kwargs)
            finally:
                gc.enable()

        return pooled

    def used(self) -> list[int]:
        """Which segments hold a tensor."""
        torch.cuda.synchronize()
        taken = {found["address"] for found in self._snapshot() if found["allocated_size"]}
        return [number for number, segment in enumerate(self.segments) if segment.address in taken]

    def _snapshot(self) -> Any:
        return self._pool.snapshot()  # type: ignore[no-untyped-call]

    def trim(self) -> None:
        """Give back what holds no tensor."""
        used = set(self.used())
        for number, segment in enumerate(self.segments):
            if number not in used:
                self._empty(segment)

    def close_scratch(self) -> None:
        """Free it, once nothing is mapped to it."""
        if self._scratch:
            memory.release(self._scratch)

    def _allocate(self, num_bytes: int, _device: int, _stream: int) -> int:
        size = -(-num_bytes // _GRANULARITY) * _GRANULARITY
        segment = _Segment(memory.reserve(size), size)
        if size < _SHARED_FROM or not self._scratch:
            segment.fill(memory.create(size), size)
        else:
            for start in range(0, size, _SCRATCH_BYTES):
                segment.fill(self._scratch, min(_SCRATCH_BYTES, size - start))
        self.segments.append(segment)
        return segment.address

    def _free(self, address: int, _num_bytes: int, _device: int, _stream: int) -> None:
        torch.cuda.synchronize()
        self._empty(next(segment for segment in self.segments if segment.address == address))

    def _empty(self, segment: _Segment) -> None:
        handles = {handle for handle, _ in segment.pieces} - {self._scratch}
        segment.clear()
        for handle in handles:
            memory.release(handle)


def share(path: str) -> None:
    """Have the first model that vLLM loads in this process share its weights through the holder's socket."""
    loading = importlib.import_module(_LOADING)
    load = loading.BaseModelLoader.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        loading.BaseModelLoader.load_model = load  # a draft model's weights are its own
        with socket.socket(socket.AF_UNIX) as holder:
            holder.settimeout(_TIMEOUT_S)
            holder.connect(path)
            is_loader = holder.recv(1) == LOADS
            torch.zeros(1, device="cuda")  # makes the context
            pool = Pool(is_real=is_loader)
            if not is_loader:
                self.load_weights = lambda *_: None
            with _pooled(loading, pool):
                model = load(self, *args, **kwargs)
            (publish if is_loader else attach)(holder, pool, model)
        return model

    loading.BaseModelLoader.load_model = load_model


@contextlib.contextmanager
def _pooled(loading: Any, pool: Pool) -> Iterator[None]:
    names = ("initialize_model", "process_weights_after_loading")
    functions = {name: getattr(loading, name) for name in names}
    for name, function in functions.items():
        setattr(loading, name, pool.wraps(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(loading, name, function)


def layout_of(pool: Pool, model: torch.nn.Module) -> Layout:
    """What two processes must have in common."""
    places = {segment.address: number for number, segment in enumerate(pool.segments)}
    tensors = []
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        start = max((start for start in places if start <= tensor.data_ptr()), default=0)
        number = places.get(start, -1)
        inside = number >= 0 and tensor.data_ptr() < start + pool.segments[number].num_bytes
        where = (number, tensor.data_ptr() - start) if inside else (-1, 0)
        tensors.append(Tensor(name, *where, str(tensor.dtype), tuple(tensor.shape), tensor.stride()))
    return Layout([segment.num_bytes for segment in pool.segments], pool.used(), tensors)


def publish(holder: socket.socket, pool: Pool, model: torch.nn.Module) -> None:
    """Send the holder the memory, after which it is read-only."""
    layout = layout_of(pool, model)
    pool.trim()
    large, small = _by_size(pool, layout)
    copied = _Segment(memory.reserve(num_bytes := sum(each.num_bytes for each in small)), num_bytes)
    copied.fill(memory.create(num_bytes), num_bytes)
    start = copied.address
    for segment in small:
        memory.copy(start, segment.address, segment.num_bytes)
        start += segment.num_bytes
    torch.cuda.synchronize()
    handles = [segment.pieces[0][0] for segment in (copied, *large)]
    descriptors = [memory.exported(handle) for handle in handles]
    send(holder, msgspec.json.encode(layout), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    copied.clear()
    memory.release(handles[0])
    _forbid_writing(large)
    log.info("weights: %.1f GiB are shared from here on", sum(each.num_bytes for each in large) / 2**30)


def attach(holder: socket.socket, pool: Pool, model: torch.nn.Module) -> None:
    """Put the memory of the process that loaded behind this one's tensors. Raises RuntimeError."""
    encoded, descriptors = receive(holder)
    layout, own = msgspec.json.decode(encoded, type=Layout), layout_of(pool, model)
    if layout != own:
        raise RuntimeError(f"the weights cannot be shared: {difference(layout, own)}")
    pool.trim()
    large, small = _by_size(pool, layout)
    handles = [memory.imported(descriptor) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for segment, handle in zip(large, handles[1:], strict=True):
        segment.clear()
        segment.fill(handle, segment.num_bytes)
    _forbid_writing(large)
    copied = _Segment(memory.reserve(num_bytes := sum(each.num_bytes for each in small)), num_bytes)
    copied.fill(handles[0], num_bytes)
    start = copied.address
    for segment in small:
        memory.copy(segment.address, start, segment.num_bytes)
        start += segment.num_bytes
    torch.cuda.synchronize()
    copied.clear()
    memory.release(handles[0])
    pool.close_scratch()
    log.info("weights: %.1f GiB are another process's", sum(each.num_bytes for each in large) / 2**30)


def _forbid_writing(segments: list[_Segment]) -> None:
    try:
        for segment in segments:
            memory.protect(segment.address, segment.num_bytes, is_writable=False)
    except PeerMemoryError as error:
        log.warning("weights: they stay writable: %s", error)


def _by_size(pool: Pool, layout: Layout) -> tuple[list[_Segment], list[_Segment]]:
    used = [pool.segments[number] for number in layout.used]
    return [s for s in used if s.num_bytes >= _SHARED_FROM], [s for s in used if s.num_bytes < _SHARED_FROM]


def difference(theirs: Layout, ours: Layout) -> str:
    """The first one, for a message."""
    for name in Layout.__struct_fields__:
        a, b = getattr(theirs, name), getattr(ours, name)
        for number, (one, other) in enumerate(zip(a, b, strict=False)):
            if one != other:
                return f"{name} {number}: {one} there, {other} here"
        if len(a) != len(b):
            return f"{len(a)} {name} there, {len(b)} here"
    return "none"
