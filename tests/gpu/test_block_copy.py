"""KV blocks out of another process's paged pool on a GPU: what arrives, how fast, and the owner's death."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from workers.engines.vllm.patches.peer_memory import Exported, PeerMemory

pytest.importorskip("triton")
from workers.engines.vllm.patches.block_copy import Regions

pytestmark = pytest.mark.gpu

NUM_REGIONS = 12
NUM_BLOCKS = 4000
BLOCK_BYTES = 128 << 10
OWNER = f"""
import sys, msgspec, torch
from workers.engines.vllm.patches.peer_memory import export
shape, device = ({NUM_BLOCKS}, {BLOCK_BYTES}), "cuda"
pools = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in range({NUM_REGIONS})]
for region, pool in enumerate(pools):
    pool.view(torch.int64)[:] = torch.arange({NUM_BLOCKS}, device="cuda")[:, None] * 100 + region
torch.cuda.synchronize()
sys.stdout.buffer.write(msgspec.json.encode(export([pool.data_ptr() for pool in pools])) + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@contextmanager
def owner(device: int) -> Iterator[tuple[subprocess.Popen[bytes], Exported]]:
    """A process with pools on that GPU, the only one that it sees."""
    command = ["env", f"CUDA_VISIBLE_DEVICES={device}", sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process, msgspec.json.decode(process.stdout.readline(), type=Exported)
        finally:
            process.kill()


def pools() -> list[torch.Tensor]:
    return [
        torch.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda") for _ in range(NUM_REGIONS)
    ]


def regions_of(own: list[torch.Tensor], memory: PeerMemory) -> Regions:
    return Regions([pool.data_ptr() for pool in own], memory.addresses, [BLOCK_BYTES] * NUM_REGIONS)


def test_blocks_arrive_where_they_belong_until_the_owner_has_ended() -> None:
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    own = pools()
    with owner(0) as (process, exported):
        memory = PeerMemory(exported)
        shuffled = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
        to_blocks, from_blocks = shuffled[:1000], shuffled[1000:2000]
        copying = regions_of(own, memory)
        copy = copying.copy(to_blocks, from_blocks)
        copying.wait()
        assert copy.is_done()
        for region, pool in enumerate(own):
            words = pool.view(torch.int64)
            expected = torch.zeros(NUM_BLOCKS, dtype=torch.int64)
            expected[to_blocks] = torch.tensor(from_blocks) * 100 + region
            assert (words.min(1).values.cpu() == expected).all()
            assert (words.max(1).values.cpu() == expected).all()
        assert memory.is_alive()
        process.kill()
        process.wait()
        assert not memory.is_alive()
        memory.close()


@pytest.mark.parametrize("num_mib", [64, 256, 786, 4096])
def test_copy_speed(num_mib: int) -> None:
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    own = pools()
    num_blocks = (num_mib << 20) // (BLOCK_BYTES * NUM_REGIONS)
    with owner(0) as (_, exported):
        memory = PeerMemory(exported)
        regions = regions_of(own, memory)
        times_ms = []
        for _ in range(10):
            copy = regions.copy(list(range(num_blocks)), list(range(num_blocks)))
            regions.wait()
            times_ms.append(copy.took_us() / 1000)
        memory.close()
    gb_s = num_blocks * BLOCK_BYTES * NUM_REGIONS / min(times_ms) / 1e6
    print(f"{num_mib} MiB in blocks of {BLOCK_BYTES >> 10} KiB: {gb_s:.0f} GB/s")  # noqa: T201  a measurement
    assert gb_s > 18, "NIXL, whose most this is (docs/gpu-runs.md), would do"
