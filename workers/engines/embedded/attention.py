"""Attention over the paged KV pool: where a step writes its tokens, and which tokens each query sees."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from workers.engines.embedded.pool import KvPool, token_slots

_SHORT = 16  # tokens: an answer's next one, with guesses
# Scores of one tile of queries: fits a CPU's cache (3 times faster on long prompts than without tiles), and
# is at most 256 MiB on a GPU.
_TILE_SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}


@dataclass(frozen=True, slots=True)
class Span:
    """`num_tokens` tokens of one sequence, from position `start`; `blocks` is its block table."""

    start: int
    num_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """What the queries of a group see in one kind of layer.

    `blocks` int64 [B * N] are gathered from the pool, N for each of B sequences; `bias` [B, 1, Q, L] with L =
    N * tokens_per_block is 0 where a query may look and -inf elsewhere."""

    blocks: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """B sequences with Q queries each: rows `first` to `first + B * Q` of the step, and their views."""

    first: int
    num_sequences: int
    num_queries: int
    views: dict[int | None, View]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Everything that attention needs in one step, shared by all layers.

    `slots` int64 [T]: the pool position of each token's KV."""

    pool: KvPool
    slots: torch.Tensor
    groups: list[Group]


def plan_attention(spans: Rows[Span], pool: KvPool, windows: set[int | None]) -> PagedBatch:
    """Lay out a step of `spans`, in token order.

    Short ones of equal length in a row form one group, gathered at once; each other one is its own. `windows`
    are the model's sliding windows in tokens; None is full attention."""
    slots = np.concatenate(
        [token_slots(s.blocks, s.start, s.start + s.num_tokens, pool.tokens_per_block) for s in spans]
    )
    batches: list[list[Span]] = []
    for span in spans:
        if batches and span.num_tokens <= _SHORT and span.num_tokens == batches[-1][0].num_tokens:
            batches[-1].append(span)
        else:
            batches.append([span])
    groups = []
    first = 0
    for batch in batches:
        num_queries = batch[0].num_tokens
        views = {window: _view(batch, window, pool) for window in windows}
        groups.append(Group(first, len(batch), num_queries, views))
        first += len(batch) * num_queries
    return PagedBatch(pool, torch.from_numpy(slots).to(pool.device), groups)


def _view(batch: Rows[Span], window: int | None, pool: KvPool) -> View:
    """The blocks from the first to the last token that any query of each span may see."""
    size = pool.tokens_per_block
    starts = [0 if window is None else max(0, span.start - window + 1) // size for span in batch]
    tables = [
        span.blocks[start : (span.start + span.num_tokens - 1) // size + 1]
        for span, start in zip(batch, starts, strict=True)
    ]
    num_blocks = max(map(len, tables))
    # Pad shorter tables with block 0: those keys come after the last query, so the bias hides them.
    blocks = np.zeros((len(batch), num_blocks), dtype=np.int64)
    for row, table in enumerate(tables):
        blocks[row, : len(table)] = table
    first_keys = np.array(starts)[:, None] * size
    keys = (first_keys + np.arange(num_blocks * size))[:, None, :]
    first_queries = np.array([span.start for span in batch])[:, None]
    queries = (first_queries + np.arange(batch[0].num_tokens))[:, :, None]
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    bias = torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), -torch.inf)
    return View(
        blocks=torch.from_numpy(blocks.reshape(-1)).to(pool.device),
        bias=bias[:, None].to(pool.device, pool.dtype),
    )


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None,
    s_aux: torch.Tensor,
    paged: PagedBatch,
    **_unused: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: `query` [1, H, T, D], `key`, `value` [1, K, T, D] -> [1, T, H, D].

    `s_aux` [H] are the attention sinks: logits that take part in the softmax but have no value."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    paged.pool.write(layer, paged.slots, key[0], value[0])
    num_kv_heads, head_dim = key.shape[1], key.shape[3]
    grouped = query[0].view(num_kv_heads, -1, *query.shape[2:]) * scaling  # [K, G, T, D]
    sinks = s_aux.view(num_kv_heads, 1, -1, 1, 1)
    outputs = []
    for group in paged.groups:
        end = group.first + group.num_sequences * group.num_queries
        rows = grouped[:, :, group.first : end]
        rows = rows.reshape(*rows.shape[:2], group.num_sequences, group.num_queries, head_dim)
        view = group.views[sliding_window]
        keys, values = paged.pool.read(layer, view.blocks, group.num_sequences)
        output = _attend(rows.transpose(1, 2), keys, values, view.bias, sinks)
        outputs.append(output.permute(1, 3, 0, 2, 4).reshape(end - group.first, -1, head_dim))
    return torch.cat(outputs).unsqueeze(0), None


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """`query` [K, B, G, Q, D], `keys` and `values` [K, B, L, D] -> [K, B, G, Q, D]; queries are tiled."""
    tile = max(1, _TILE_SCORES[query.device.type] // (query.shape[:3].numel() * keys.shape[2]))
    outputs = []
    for first in range(0, query.shape[3], tile):
        rows = query[:, :, :, first : first + tile]
        scores = (rows.flatten(2, 3) @ keys.mT).view(*rows.shape[:4], -1)
        scores = scores + bias[:, :, first : first + tile]
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :-1].to(values.dtype)
        outputs.append((weights.flatten(2, 3) @ values).view(rows.shape))
    return torch.cat(outputs, dim=3)
