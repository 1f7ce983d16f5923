"""Memory that another process exported: whose it is, and whether its owner runs. Mapping needs a GPU."""

import os
import subprocess
import sys

import pytest

from workers.engines.vllm.patches.peer_memory import (
    Exported,
    PeerMemory,
    PeerMemoryError,
    Region,
    export,
    place,
)


def test_an_owner_is_alive_until_it_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        memory = PeerMemory(Exported(place(), owner.pid, [], []))
        assert memory.is_alive()
        assert memory.addresses == []
        owner.kill()
        owner.wait()
        assert not memory.is_alive()
        memory.close()
        memory.close()


@pytest.mark.parametrize(
    ("allocations", "regions"), [([b"short"], []), ([], [Region(0, 0)]), ([b"x" * 64], [Region(0, 0)])]
)
def test_nonsense_is_refused_and_leaves_nothing_open(allocations: list[bytes], regions: list[Region]) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PeerMemoryError, match="cannot map the owner's memory"):
        PeerMemory(Exported(place(), os.getpid(), allocations, regions))
    assert os.listdir("/proc/self/fd") == before


def test_memory_that_is_not_a_gpus_cannot_be_exported() -> None:
    with pytest.raises(PeerMemoryError, match="cuMemGetAddressRange_v2"):
        export([4096])
