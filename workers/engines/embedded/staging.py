"""Contiguous staging buffers for KV that is offered or pulled."""

from dataclasses import dataclass

import torch

from workers.kv.memory import Memory

_MIN_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A uint8 `tensor` with `num_bytes` in use; `memory` is all of it, for the transceiver."""

    tensor: torch.Tensor
    memory: Memory
    num_bytes: int

    @property
    def used(self) -> Memory:
        """The bytes in use."""
        return self.memory.part(0, self.num_bytes)


class Staging:
    """Reuses buffers by size, in powers of two, so that the transceiver registers each only once.

    They are on the device if the transceiver can move device memory, else on the host.
    """

    def __init__(self, device: torch.device, *, on_device: bool) -> None:
        self._device = device if on_device else torch.device("cpu")
        self._pinned = device.type == "cuda" and not on_device
        self._free: dict[int, list[tuple[torch.Tensor, Memory]]] = {}

    def take(self, num_bytes: int) -> Buffer:
        """A buffer with room for `num_bytes`; its contents are arbitrary."""
        size = max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        tensor, memory = free.pop() if free else self._allocate(size)
        return Buffer(tensor, memory, num_bytes)

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer that is not read or written any more."""
        self._free[buffer.memory.num_bytes].append((buffer.tensor, buffer.memory))

    def _allocate(self, size: int) -> tuple[torch.Tensor, Memory]:
        tensor = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        index = tensor.device.index if tensor.is_cuda else None
        return tensor, Memory(address=tensor.data_ptr(), num_bytes=size, device_index=index, owner=tensor)
