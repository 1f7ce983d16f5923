"""The KV pool's tensors: paged access for attention, gather and scatter for handoffs."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from baton.messages import KvLayout
from workers.kv.memory import Memory


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of the model's KV cache. `windows` has one entry per layer: tokens, None = full."""

    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    @property
    def num_token_elements(self) -> int:
        return len(self.windows) * 2 * self.num_kv_heads * self.head_dim


def token_slots(blocks: Sequence[int], start: int, end: int, tokens_per_block: int) -> np.ndarray:
    """The pool positions of tokens `start` to `end` of a sequence with these blocks."""
    positions = np.arange(start, end)
    table = np.asarray(blocks, dtype=np.int64)
    return table[positions // tokens_per_block] * tokens_per_block + positions % tokens_per_block


@dataclass(eq=False)
class KvPool:
    """One tensor [layers, 2, kv heads, blocks, tokens per block, head dim] for K and V of every layer.

    Sliding-window layers keep all tokens too, so that all layers share one block table. All methods run on
    the compute thread."""

    shape: KvShape
    _: KW_ONLY
    num_blocks: int
    tokens_per_block: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        shape, blocks = self.shape, (self.num_blocks, self.tokens_per_block)
        sizes = (len(shape.windows), 2, shape.num_kv_heads, *blocks, shape.head_dim)
        # Zeros: a masked key has weight 0, but 0 times a stray NaN is NaN.
        self._blocks = torch.zeros(sizes, dtype=self.dtype, device=self.device)
        self._slots = self._blocks.flatten(3, 4)  # the same memory, token by token

    @property
    def layout(self) -> KvLayout:
        """The pool's shape, for comparison between workers."""
        return KvLayout(
            dtype=str(self.dtype).removeprefix("torch."),
            tokens_per_block=self.tokens_per_block,
            num_layers=len(self.shape.windows),
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
        )

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `keys` and `values` [kv heads, T, head dim] at `slots` [T] of `layer`."""
        self._slots[layer, 0].index_copy_(1, slots, keys)
        self._slots[layer, 1].index_copy_(1, slots, values)

    def read(self, layer: int, blocks: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `blocks` [B * N], each as [kv heads, B, N * tokens per block, head dim]."""
        keys, values = (
            self._blocks[layer, part]
            .index_select(1, blocks)
            .view(self.shape.num_kv_heads, num_sequences, -1, self.shape.head_dim)
            for part in (0, 1)
        )
        return keys, values

    def gather(self, blocks: tuple[int, ...], num_tokens: int, into: torch.Tensor) -> None:
        """Copy the KV of the first `num_tokens` to the front of `into`, uint8.

        Token by token, each [layers, 2, kv heads, head dim], so that an end of it is that of the last tokens.
        """
        slots = self._token_slots(blocks, 0, num_tokens)
        for layer, piece in enumerate(self._by_layer(into, num_tokens)):
            piece.copy_(self._slots[layer].index_select(2, slots))
        self._synchronize()

    def scatter(self, payload: torch.Tensor, blocks: tuple[int, ...], start: int, num_tokens: int) -> None:
        """The reverse of `gather` from token `start` on: store a pulled `payload` into `blocks`."""
        slots = self._token_slots(blocks, start, num_tokens)
        for layer, piece in enumerate(self._by_layer(payload, num_tokens - start)):
            self._slots[layer].index_copy_(2, slots, piece.to(self.device))
        self._synchronize()

    def num_handoff_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.shape.num_token_elements * self.dtype.itemsize

    def _by_layer(self, buffer: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The buffer's front as [layers, 2, kv heads, tokens, head dim]."""
        payload = buffer[: self.num_handoff_bytes(num_tokens)].view(self.dtype)
        sides = (len(self.shape.windows), 2, self.shape.num_kv_heads, self.shape.head_dim)
        return payload.view(num_tokens, *sides).permute(1, 2, 3, 0, 4)

    def _token_slots(self, blocks: tuple[int, ...], start: int, end: int) -> torch.Tensor:
        return torch.from_numpy(token_slots(blocks, start, end, self.tokens_per_block)).to(self.device)

    def _synchronize(self) -> None:
        # Transceivers access memory outside torch's streams.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


_MIN_BYTES = 1 << 16


class Staging:
    """Reuses buffers by size, in powers of two, so that the transceiver registers each only once.

    They are on the device if the transceiver can move device memory, else on the host."""

    def __init__(self, device: torch.device, *, on_device: bool) -> None:
        self._device = device if on_device else torch.device("cpu")
        self._pinned = device.type == "cuda" and not on_device
        self._free: dict[int, list[Memory]] = {}

    def take(self, num_bytes: int) -> Memory:
        """A part of a buffer, whose `owner` is a uint8 tensor; its contents are arbitrary."""
        size = max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        if not free:
            tensor = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
            index = tensor.device.index if tensor.is_cuda else None
            free.append(Memory(address=tensor.data_ptr(), num_bytes=size, device_index=index, owner=tensor))
        return free.pop().part(0, num_bytes)

    def give_back(self, buffer: Memory) -> None:
        """Return a buffer that is neither read nor written."""
        assert buffer.whole is not None
        self._free[buffer.whole.num_bytes].append(buffer.whole)
