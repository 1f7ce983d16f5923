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
_SCRATCH_BYTES = _GRANULARITY  # CUDA maps a handle as a whole: part of one was refused with error 801
_TIMEOUT_S = 1800.0


class Layout(msgspec.Struct, frozen=True):
    """What two processes must have in common: sizes of all segments as allocated, which of them are used at
    the end, and where each tensor is.
    """

    sizes: list[int]
    used: list[int]
    tensors: list[str]

    def difference(self, other: "Layout") -> str:
        """The first one, for a message; empty without one."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                pairs = [(a, b) for a, b in zip(mine, theirs, strict=False) if a != b]
                return f"{name}: {len(mine)} and {len(theirs)}, the first different ones {pairs[:1]}"
        return ""


@dataclasses.dataclass
class Segment:
    """Addresses, and a handle that is mapped behind them every `step` bytes; 0: none is."""

    address: int
    num_bytes: int
    handle: int = 0
    step: int = 0

    def put(self, handle: int, step: int) -> None:
        """Map this handle instead."""
        for start in range(0, self.num_bytes, self.step) if self.handle else ():
            memory.unmap(self.address + start, min(self.step, self.num_bytes - start))
        self.handle, self.step = handle, step
        for start in range(0, self.num_bytes, step) if handle else ():
            memory.map_at(self.address + start, min(step, self.num_bytes - start), handle)


class Pool:
    """Segments of PyTorch's allocator in the order of their allocation, with nothing but a scratch behind
    large ones unless `is_real`.
    """

    def __init__(self, *, is_real: bool) -> None:
        self.segments: list[Segment] = []
        self._scratch = 0 if is_real else memory.create(_SCRATCH_BYTES)
        self._pool = self._made()

    def _made(self) -> torch.cuda.MemPool:
        """What PyTorch calls until the process ends, in whatever order it destroys its objects."""
        place, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        calls = (
            ctypes.CFUNCTYPE(place, size, number, place)(self._allocate),
            ctypes.CFUNCTYPE(None, place, size, number, place)(self._free),
        )
        addresses = [ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls]
        allocator = torch._C._cuda_customAllocator(*addresses)  # noqa: SLF001  as its class does
        made = torch.cuda.MemPool(allocator)
        for kept in (calls, allocator, made):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        return made

    def wraps(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, allocating from this pool, and freeing in the same order each time."""

        def pooled(*args: Any, **kwargs: Any) -> Any:
            gc.collect()
            gc.disable()
            try:
                with torch.cuda.use_mem_pool(self._pool):
                    return function(*args, **kwargs)
            finally:
                gc.enable()

        return pooled

    def layout(self, model: torch.nn.Module) -> Layout:
        """After all is allocated; memory that holds no tensor is given back."""
        memory.wait()
        taken = self._taken()
        used = [number for number, segment in enumerate(self.segments) if segment.address in taken]
        for number in set(range(len(self.segments))) - set(used):
            self._drop(self.segments[number])
        tensors = []
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            places = (
                f"{number}+{offset}"
                for number, segment in enumerate(self.segments)
                if 0 <= (offset := tensor.data_ptr() - segment.address) < segment.num_bytes
            )
            kind = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
            tensors.append(f"{name} {kind} {next(places, 'elsewhere')}")
        return Layout([segment.num_bytes for segment in self.segments], used, tensors)

    def _taken(self) -> set[int]:
        found = self._pool.snapshot()  # type: ignore[no-untyped-call]
        return {segment["address"] for segment in found if segment["allocated_size"]}

    def exported(self) -> list[int]:
        """Descriptors of a copy of the small segments, and of the large ones, which are then read-only."""
        large, small = self._by_size()
        copied = memory.create(sum(segment.num_bytes for segment in small))
        self._copy(small, copied, back=False)
        descriptors = [memory.exported(handle) for handle in (copied, *(each.handle for each in large))]
        memory.release(copied)
        self._freeze(large)
        return descriptors

    def replace(self, descriptors: list[int]) -> None:
        """Put what another process exported behind these addresses."""
        large, small = self._by_size()
        copied, *handles = map(memory.imported, descriptors)
        for segment, handle in zip(large, handles, strict=True):
            segment.put(handle, segment.num_bytes)
        self._copy(small, copied, back=True)
        for handle in (copied, self._scratch):
            memory.release(handle)
        self._freeze(large)

    def _by_size(self) -> tuple[list[Segment], list[Segment]]:
        used = [segment for segment in self.segments if segment.handle]
        return [s for s in used if s.num_bytes >= _SHARED_FROM], [
            s for s in used if s.num_bytes < _SHARED_FROM
        ]

    def _copy(self, small: list[Segment], handle: int, *, back: bool) -> None:
        num_bytes = sum(segment.num_bytes for segment in small)
        copy = Segment(memory.reserve(num_bytes), num_bytes)
        copy.put(handle, num_bytes)
        place = copy.address
        for segment in small:
            pair = (segment.address, place) if back else (place, segment.address)
            memory.copy(*pair, segment.num_bytes)
            place += segment.num_bytes
        memory.wait()
        copy.put(0, 0)

    def _freeze(self, segments: list[Segment]) -> None:
        try:
            for segment in segments:
                memory.freeze(segment.address, segment.num_bytes)
        except PeerMemoryError as error:
            log.warning("the weights stay writable: %s", error)
        log.info("%.1f GiB of weights are shared", sum(segment.num_bytes for segment in segments) / 2**30)

    def _allocate(self, num_bytes: int, _device: int, _stream: int) -> int:
        size = -(-num_bytes // _GRANULARITY) * _GRANULARITY
        try:
            segment = Segment(memory.reserve(size), size)
            if size < _SHARED_FROM or not self._scratch:
                segment.put(memory.create(size), size)
            else:
                segment.put(self._scratch, _SCRATCH_BYTES)
        except Exception:  # else PyTorch would take any address for the result
            log.exception("no memory for weights")
            return 0
        self.segments.append(segment)
        return segment.address

    def _free(self, address: int, _num_bytes: int, _device: int, _stream: int) -> None:
        memory.wait()
        self._drop(next(segment for segment in self.segments if segment.address == address))

    def _drop(self, segment: Segment) -> None:
        handle = segment.handle
        segment.put(0, 0)
        if handle not in {0, self._scratch}:
            memory.release(handle)


def share(path: str) -> None:
    """Have the first model that vLLM loads in this process share its weights through the holder's socket."""
    loading = importlib.import_module("vllm.model_executor.model_loader.base_loader")
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
            exchange(holder, pool, model, is_loader=is_loader)
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


def exchange(holder: socket.socket, pool: Pool, model: torch.nn.Module, *, is_loader: bool) -> None:
    """Send the holder this process's memory, or get another one's. Raises RuntimeError."""
    own = pool.layout(model)
    if is_loader:
        descriptors = pool.exported()
        send(holder, msgspec.json.encode(own), descriptors)
    else:
        encoded, descriptors = receive(holder)
        if difference := msgspec.json.decode(encoded, type=Layout).difference(own):
            raise RuntimeError(f"the weights of the process that loaded them lie differently: {difference}")
        pool.replace(descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
