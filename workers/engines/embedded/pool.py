"""The KV pool's tensors: paged access for attention, gather and scatter for handoffs."""

from dataclasses import dataclass

import numpy as np
import torch

from baton.messages import KvLayout


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of the model's KV cache. `windows` has one entry per layer: tokens, None = full."""

    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    def num_carried(self, layer: int, num_tokens: int) -> int:
        """Tokens of `layer` visible after `num_tokens`, which is all that a handoff carries."""
        window = self.windows[layer]
        return num_tokens if window is None else min(num_tokens, window - 1)


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
        """Copy the handoff's part of the first `num_tokens` to the front of `into`, uint8.

        Layer by layer, each [2, kv heads, tokens, head dim]; sliding-window layers have their window only.
        """
        slots = self._token_slots(blocks, num_tokens)
        for layer, piece in enumerate(self._pieces(into, num_tokens)):
            piece.copy_(self._slots[layer].index_select(2, slots[num_tokens - piece.shape[2] :]))
        self._synchronize()

    def scatter(self, payload: torch.Tensor, blocks: tuple[int, ...], num_tokens: int) -> None:
        """The reverse of `gather`: store a pulled `payload` into `blocks`."""
        slots = self._token_slots(blocks, num_tokens)
        for layer, piece in enumerate(self._pieces(payload, num_tokens)):
            target = slots[num_tokens - piece.shape[2] :]
            self._slots[layer].index_copy_(2, target, piece.to(self.device))
        self._synchronize()

    def num_handoff_bytes(self, num_tokens: int) -> int:
        """Size of the KV in a handoff of `num_tokens`."""
        return sum(self._piece_bytes(num_tokens))

    def _piece_bytes(self, num_tokens: int) -> list[int]:
        shape = self.shape
        row_bytes = 2 * shape.num_kv_heads * shape.head_dim * self.dtype.itemsize
        return [row_bytes * shape.num_carried(layer, num_tokens) for layer in range(len(shape.windows))]

    def _pieces(self, buffer: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
        sizes = self._piece_bytes(num_tokens)
        pieces = torch.split(buffer[: sum(sizes)], sizes)
        sides = (2, self.shape.num_kv_heads, -1, self.shape.head_dim)
        return [piece.view(self.dtype).view(sides) for piece in pieces]

    def _token_slots(self, blocks: tuple[int, ...], num_tokens: int) -> torch.Tensor:
        size = self.tokens_per_block
        slots = np.asarray(blocks, dtype=np.int64)[:, None] * size + np.arange(size)
        return torch.from_numpy(slots.reshape(-1)[:num_tokens]).to(self.device)

    def _synchronize(self) -> None:
        # Transceivers access memory outside torch's streams.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
