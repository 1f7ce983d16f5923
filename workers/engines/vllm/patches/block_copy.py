"""Copies blocks of KV between paged pools in one kernel, also from another GPU's memory over NVLink."""

from typing import Any

import torch
import triton
import triton.language as tl

_cuda: Any = torch.cuda  # untyped
_WORD_BYTES = 8
_ALIGNMENT_BYTES = 16
_TILE_WORDS = 4096  # 32 KiB in flight per program
_NUM_PROGRAMS = 24  # of an H200's 132 multiprocessors: enough for NVLink, and decode's steps hardly feel them


@triton.jit(do_not_specialize=["num_blocks", "num_copies"])  # type: ignore[untyped-decorator]  # Triton's
def _copy(targets, sources, words, blocks, num_blocks, num_copies, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803, PLR0917  Triton's ways
    for copy in range(tl.program_id(0), num_copies, tl.num_programs(0)):
        region = copy // num_blocks
        block = copy % num_blocks
        num_words = tl.load(words + region)
        target = tl.load(targets + region) + tl.load(blocks + block) * num_words * 8
        source = tl.load(sources + region) + tl.load(blocks + num_blocks + block) * num_words * 8
        target = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        source = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        for start in range(0, num_words, TILE):
            offsets = start + tl.arange(0, TILE)
            inside = offsets < num_words
            tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)


class Copy:
    """A copy that has begun; what is between the events `began` and `ended` on its stream."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.began, self.ended = (_cuda.Event(enable_timing=True) for _ in range(2))

    def is_done(self) -> bool:
        """Whether all has arrived."""
        return bool(self.ended.query())

    def took_us(self) -> float:
        """What a copy that is done took on the GPU."""
        return float(self.began.elapsed_time(self.ended)) * 1000


class Regions:
    """The regions of two pools, in the same order: addresses, and the bytes of a block in each, multiples of
    16. Copies run on a stream of their own, after what was on the current one."""

    def __init__(self, targets: list[int], sources: list[int], block_bytes: list[int]) -> None:
        """Raises ValueError if they do not fit together."""
        if not len(targets) == len(sources) == len(block_bytes):
            raise ValueError(f"{len(targets)}, {len(sources)} and {len(block_bytes)} regions")
        if any(value % _ALIGNMENT_BYTES for value in (*targets, *sources, *block_bytes)):
            raise ValueError(f"an address or a block size is not a multiple of {_ALIGNMENT_BYTES} bytes")
        self._bytes_per_block = sum(block_bytes)
        self._num = len(targets)
        words = [num_bytes // _WORD_BYTES for num_bytes in block_bytes]
        self._tables = torch.tensor([targets, sources, words], dtype=torch.int64, device="cuda")
        self._stream = _cuda.Stream()

    def copy(self, to_blocks: list[int], from_blocks: list[int]) -> Copy:
        """Begin to copy those blocks of all regions. Raises ValueError if they do not pair up."""
        if len(to_blocks) != len(from_blocks):
            raise ValueError(f"{len(from_blocks)} blocks into {len(to_blocks)}")
        copy = Copy(self._bytes_per_block * len(to_blocks))
        self._stream.wait_stream(torch.cuda.current_stream())  # steps that still use the blocks
        with torch.cuda.stream(self._stream):
            blocks = torch.tensor([to_blocks, from_blocks], dtype=torch.int64, pin_memory=True)
            copy.began.record()
            num_copies = self._num * len(to_blocks)
            _copy[(min(_NUM_PROGRAMS, num_copies),)](
                *self._tables,
                blocks.to("cuda", non_blocking=True),
                len(to_blocks),
                num_copies,
                TILE=_TILE_WORDS,
                num_warps=8,
            )
            copy.ended.record()
        return copy

    def wait(self) -> None:
        """Return when all copies are done."""
        self._stream.synchronize()
