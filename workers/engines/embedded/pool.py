"""The KV pool's tensors: paged access for attention, gather and scatter for handoffs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from baton.messages import KvLayout
from workers.engines.embedded.ledger import first_whole_block
from workers.kv.memory import Memory


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of the model's KV cache. `windows` has one entry per layer: tokens, None = full."""

    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    @property
    def window(self) -> int:
        """The longest sliding window in tokens; 0 without any."""
        return max((window for window in self.windows if window is not None), default=0)


class KvPool:
    """One tensor [layers, 2, kv heads, blocks, tokens per block, head dim] for K and V of every layer.

    Sliding-window layers keep all tokens too, so that all layers share one block table. All methods run on
    the compute thread.
    """

    def __init__(
        self,
        shape: KvShape,
        *,
        num_blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.dtype = dtype
        self.compute_dtype = compute_dtype
        self.device = device
        sizes = (len(shape.windows), 2, shape.num_kv_heads, num_blocks, tokens_per_block, shape.head_dim)
        # Zeros: a masked key has weight 0, but 0 times a stray NaN is NaN.
        self._blocks = torch.zeros(sizes, dtype=dtype, device=device)
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
        self._slots[layer, 0].index_copy_(1, slots, keys.to(self.dtype))
        self._slots[layer, 1].index_copy_(1, slots, values.to(self.dtype))

    def read(self, layer: int, blocks: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `blocks` [B * N], each as [kv heads, B, N * tokens per block, head dim]."""
        keys, values = (
            self._blocks[layer, part]
            .index_select(1, blocks)
            .view(self.shape.num_kv_heads, num_sequences, -1, self.shape.head_dim)
            .to(self.compute_dtype)
            for part in (0, 1)
        )
        return keys, values

    def gather(self, blocks: tuple[int, ...], num_tokens: int, into: torch.Tensor) -> None:
        """Copy the KV of the first `num_tokens` to the front of `into`, uint8.

        Token by token, each [layers, 2, kv heads, head dim]. The first tokens have only the layers with full
        attention; those from `first_whole_block` on have all, so that any later turn can continue from them.
        """
        for piece, layers, slots in self._pieces(into, blocks, 0, num_tokens):
            for i, layer in enumerate(layers):
                piece[:, i].copy_(self._slots[layer].index_select(2, slots).permute(2, 0, 1, 3))
        self._synchronize()

    def scatter(self, payload: torch.Tensor, blocks: tuple[int, ...], start: int, num_tokens: int) -> None:
        """The reverse of `gather` from token `start` on: store a pulled `payload` into `blocks`."""
        for piece, layers, slots in self._pieces(payload, blocks, start, num_tokens):
            for i, layer in enumerate(layers):
                self._slots[layer].index_copy_(2, slots, piece[:, i].to(self.device).permute(1, 2, 0, 3))
        self._synchronize()

    def num_handoff_bytes(self, num_tokens: int, start: int = 0) -> int:
        """Size of the KV from token `start` on in a handoff of `num_tokens`."""
        return sum(
            len(tokens) * self._token_bytes(layers) for tokens, layers in self._parts(start, num_tokens)
        )

    def _token_bytes(self, layers: list[int]) -> int:
        return len(layers) * 2 * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize

    def _parts(self, start: int, num_tokens: int) -> list[tuple[range, list[int]]]:
        """The tokens from `start` on with the layers that a handoff of `num_tokens` has of each."""
        windows = self.shape.windows
        size = self.tokens_per_block
        whole = size * first_whole_block(num_tokens, window=self.shape.window, tokens_per_block=size)
        full = [layer for layer, window in enumerate(windows) if window is None]
        return [
            (range(start, max(start, whole)), full),
            (range(max(start, whole), num_tokens), list(range(len(windows)))),
        ]

    def _pieces(
        self, buffer: torch.Tensor, blocks: tuple[int, ...], start: int, num_tokens: int
    ) -> Iterator[tuple[torch.Tensor, list[int], torch.Tensor]]:
        """(part of the buffer [tokens, layers, 2, kv heads, head dim], its layers, the tokens' slots)."""
        slots = self._token_slots(blocks)
        sides = (2, self.shape.num_kv_heads, self.shape.head_dim)
        at = 0
        for tokens, layers in self._parts(start, num_tokens):
            end = at + len(tokens) * self._token_bytes(layers)
            piece = buffer[at:end].view(self.dtype).view(len(tokens), len(layers), *sides)
            at = end
            if piece.numel():
                yield piece, layers, slots[tokens.start : tokens.stop]

    def _token_slots(self, blocks: tuple[int, ...]) -> torch.Tensor:
        size = self.tokens_per_block
        slots = np.asarray(blocks, dtype=np.int64)[:, None] * size + np.arange(size)
        return torch.from_numpy(slots.reshape(-1)).to(self.device)

    def _synchronize(self) -> None:
        # Transceivers access memory outside torch's streams.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


_MIN_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A uint8 `tensor`, and the part of it that is in use, for the transceiver."""

    tensor: torch.Tensor
    used: Memory


class Staging:
    """Reuses buffers by size, in powers of two, so that the transceiver registers each only once.

    They are on the device if the transceiver can move device memory, else on the host.
    """

    def __init__(self, device: torch.device, *, on_device: bool) -> None:
        self._device = device if on_device else torch.device("cpu")
        self._pinned = device.type == "cuda" and not on_device
        self._free: dict[int, list[Buffer]] = {}

    def take(self, num_bytes: int) -> Buffer:
        """A buffer with room for `num_bytes`; its contents are arbitrary."""
        size = max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        buffer = free.pop() if free else self._allocate(size)
        return Buffer(buffer.tensor, (buffer.used.whole or buffer.used).part(0, num_bytes))

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer that is neither read nor written."""
        self._free[buffer.tensor.nbytes].append(buffer)

    def _allocate(self, size: int) -> Buffer:
        tensor = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        index = tensor.device.index if tensor.is_cuda else None
        memory = Memory(address=tensor.data_ptr(), num_bytes=size, device_index=index, owner=tensor)
        return Buffer(tensor, memory)
