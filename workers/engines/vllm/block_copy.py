"""Copies blocks of KV between paged pools in one kernel, also from another GPU's memory over NVLink."""

import torch
import triton
import triton.language as tl

_WORD_BYTES = 8
_TILE_WORDS = 4096  # 32 KiB in flight per program
NUM_PROGRAMS = 24  # of an H200's 132 multiprocessors: enough for NVLink, and decode's steps hardly feel them


@triton.jit(do_not_specialize=["num_blocks", "num_copies"])  # type: ignore[untyped-decorator]
def _copy(targets, sources, words, to_blocks, from_blocks, num_blocks, num_copies, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803, PLR0917  Triton's ways
    for copy in range(tl.program_id(0), num_copies, tl.num_programs(0)):
        region = copy // num_blocks
        block = copy % num_blocks
        num_words = tl.load(words + region)
        target = tl.load(targets + region) + tl.load(to_blocks + block) * num_words * 8
        source = tl.load(sources + region) + tl.load(from_blocks + block) * num_words * 8
        target = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        source = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        for start in range(0, num_words, TILE):
            offsets = start + tl.arange(0, TILE)
            inside = offsets < num_words
            tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)


class Regions:
    """The regions of two pools, in the same order; `block_bytes` are those of a block in each region.

    Addresses and block sizes are multiples of 16.
    """

    def __init__(self, targets: list[int], sources: list[int], block_bytes: list[int]) -> None:
        """Raises ValueError if they do not fit together."""
        if not len(targets) == len(sources) == len(block_bytes):
            raise ValueError(f"{len(targets)}, {len(sources)} and {len(block_bytes)} regions")
        if any(value % 16 for value in (*targets, *sources, *block_bytes)):
            raise ValueError("an address or a block size is not a multiple of 16 bytes")
        self.bytes_per_block = sum(block_bytes)
        self._num = len(targets)
        words = [num_bytes // _WORD_BYTES for num_bytes in block_bytes]
        self._tables = torch.tensor([targets, sources, words], dtype=torch.int64, device="cuda")

    def copy(self, to_blocks: list[int], from_blocks: list[int]) -> None:
        """Copy those blocks of all regions on the current stream. Raises ValueError if they do not pair up."""
        if len(to_blocks) != len(from_blocks):
            raise ValueError(f"{len(from_blocks)} blocks into {len(to_blocks)}")
        blocks = torch.tensor([to_blocks, from_blocks], dtype=torch.int64, pin_memory=True)
        on_gpu = blocks.to("cuda", non_blocking=True)
        num_copies = self._num * len(to_blocks)
        targets, sources, words = self._tables
        _copy[(min(NUM_PROGRAMS, num_copies),)](
            targets,
            sources,
            words,
            on_gpu[0],
            on_gpu[1],
            len(to_blocks),
            num_copies,
            TILE=_TILE_WORDS,
            num_warps=8,
        )
