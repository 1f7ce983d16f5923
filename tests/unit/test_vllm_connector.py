"""Baton's connector for vLLM: what it reads from mapped memory, what goes over NIXL, and failed reads."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from workers.engines.vllm.patches import NUM_TOKENS
from workers.engines.vllm.patches.connector import Peer, PeerConnector, PeerHandshake, PeerWorker
from workers.engines.vllm.patches.peer_memory import Exported, PeerMemory, place

OWN, BLOCK_BYTES = [4096, 8192], [32, 64]


@dataclasses.dataclass
class Copied:
    """A copy that is done when the test says so."""

    to_blocks: list[int]
    from_blocks: list[int]
    done: bool = False
    num_bytes: int = 96

    def is_done(self) -> bool:
        return self.done

    def took_us(self) -> float:
        return 1.0


class Regions:
    def __init__(self) -> None:
        self.copies: list[Copied] = []
        self.waited = False

    def copy(self, to_blocks: list[int], from_blocks: list[int]) -> Copied:
        self.copies.append(Copied(to_blocks, from_blocks))
        return self.copies[-1]

    def wait(self) -> None:
        self.waited = True


class Decode(PeerWorker):
    """A decode worker whose copies are recorded."""

    def __init__(self) -> None:
        super().__init__(None, "decode", None)
        self.regions = Regions()
        self.register_kv_caches(dict(zip("ab", zip(OWN, BLOCK_BYTES, strict=True), strict=True)))

    def _regions(self, targets: list[int], sources: list[int], block_bytes: list[int]) -> Any:
        assert (targets, block_bytes) == (OWN, BLOCK_BYTES)
        return self.regions

    def introduce(self, owner_pid: int, *, where: str = "", tp_size: int = 1, block_size: int = 64) -> None:
        """What a handshake leaves behind."""
        self.engines["prefill"] = SimpleNamespace(
            remote_tp_size=tp_size, remote_block_size=block_size, remote_physical_blocks_per_logical=1
        )
        self._remote_agents["prefill"] = {0: "agent"}
        self._offered["prefill", 0] = Exported(where or place(), owner_pid, [], [])

    def read(self, request_id: str, ours: list[list[int]], theirs: list[list[int]]) -> None:
        spec = SimpleNamespace(remote_rank=0, local_block_ids=ours, remote_block_ids=theirs)
        self._read_blocks(
            read_spec=spec,
            dst_engine_id="prefill",
            request_id=request_id,
            remote_request_id=f"{request_id}-there",
            local_xfer_side_handle=1,
            remote_xfer_side_handle=2,
        )

    @property
    def over_nixl(self) -> list[str]:
        return list(self._recving_transfers)

    @property
    def peers(self) -> list[Peer]:
        return list(self._peers.values())


@pytest.fixture
def prefill() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_what_decode_lacks_is_read_and_prefill_told_once_it_has_arrived(
    prefill: subprocess.Popen[bytes],
) -> None:
    decode = Decode()
    decode.introduce(prefill.pid)
    decode.read("one", [[7, 8], [9]], [[1, 2, 3], [4, 5]])
    (copy,) = decode.regions.copies
    assert (copy.to_blocks, copy.from_blocks) == ([7, 8, 9], [2, 3, 5])
    assert decode.get_finished() == (set(), set())
    assert decode.notices == []
    copy.done = True
    assert decode.get_finished() == (set(), {"one"})
    assert decode.notices == [("agent", b"one-there:1")]
    assert decode.moved == [(96, 1.0)]  # NIXL counts microseconds, too
    assert decode.over_nixl == []
    assert decode.get_finished() == (set(), set())


@pytest.mark.parametrize(
    "differs",
    [{"where": "elsewhere"}, {"tp_size": 2}, {"block_size": 16}],
    ids=lambda value: next(iter(value)),
)
def test_kv_that_cannot_be_mapped_moves_over_nixl(
    prefill: subprocess.Popen[bytes], differs: dict[str, Any]
) -> None:
    decode = Decode()
    decode.introduce(prefill.pid, **differs)
    decode.read("one", [[1]], [[1]])
    decode.read("two", [[1]], [[1]])
    assert decode.over_nixl == ["one", "two"]
    assert decode.regions.copies == []


def test_a_read_fails_if_prefill_ends_before_it_is_done(prefill: subprocess.Popen[bytes]) -> None:
    decode = Decode()
    decode.introduce(prefill.pid)
    decode.read("one", [[1]], [[1]])
    prefill.kill()
    prefill.wait()
    assert decode.get_finished()[1] == set()  # the copy still writes into the blocks
    decode.regions.copies[0].done = True
    assert decode.get_finished()[1] == {"one"}
    assert decode.failed == ["one"]
    assert decode.notices == []
    decode.read("two", [[2]], [[2]])
    assert decode.over_nixl == ["two"]  # its memory is unmapped


def test_memory_of_a_worker_that_has_ended_is_unmapped_once_it_is_not_being_read(
    prefill: subprocess.Popen[bytes],
) -> None:
    decode = Decode()
    decode.introduce(prefill.pid)
    decode.read("one", [[1]], [[1]])
    prefill.kill()
    prefill.wait()
    decode.get_finished()
    assert len(decode.peers) == 1  # it is being read
    decode.regions.copies[0].done = True
    decode.get_finished()
    assert decode.peers == []
    decode.introduce(os.getpid())
    decode.read("two", [[2]], [[2]])
    assert len(decode.peers) == 1


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> list[PeerMemory]:
    """The memory that was unmapped."""
    closed: list[PeerMemory] = []
    close = PeerMemory.close

    def noted(memory: PeerMemory) -> None:
        closed.append(memory)
        close(memory)

    monkeypatch.setattr(PeerMemory, "close", noted)
    return closed


def test_a_shutdown_unmaps_what_is_no_longer_read(
    prefill: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Decode()
    decode.introduce(prefill.pid)
    decode.read("one", [[1]], [[1]])
    had_waited: list[bool] = []
    monkeypatch.setattr(PeerMemory, "close", lambda _: had_waited.append(decode.regions.waited))
    decode.shutdown()
    assert had_waited == [True]


def test_memory_that_does_not_fit_is_unmapped_and_its_kv_moves_over_nixl(
    prefill: subprocess.Popen[bytes], unmapped: list[PeerMemory]
) -> None:
    class Other(Decode):
        def _regions(self, targets: list[int], sources: list[int], block_bytes: list[int]) -> Any:
            raise ValueError("their layers differ")

    decode = Other()
    decode.introduce(prefill.pid)
    decode.read("one", [[1]], [[1]])
    assert decode.over_nixl == ["one"]
    assert len(unmapped) == 1


@pytest.mark.parametrize(
    ("num_kept", "num_computed", "num_lacking"), [(12, 4, 6), (8, 4, 4), (8, 8, 0), (4, 8, 0)]
)
def test_what_decode_lacks_of_the_prompt_is_read(num_kept: int, num_computed: int, num_lacking: int) -> None:
    params = {"do_remote_prefill": True, NUM_TOKENS: num_kept}
    assert to_be_read(params, num_computed) == (num_lacking, num_lacking > 0)


def to_be_read(params: dict[str, Any] | None, num_computed: int) -> tuple[int | None, bool]:
    """What decode reads of a prompt of 10 tokens."""
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="engine"))
    connector = PeerConnector(config, KVConnectorRole.SCHEDULER, None)
    request = SimpleNamespace(kv_transfer_params=params, num_prompt_tokens=10)
    return connector.get_num_new_matched_tokens(request, num_computed)


def test_a_handshake_tells_nixls_readers_and_ours() -> None:
    told = msgspec.msgpack.encode(PeerHandshake("hash", b"metadata", Exported("here", 1, [b"h"], [])))
    assert msgspec.msgpack.decode(told, type=PeerHandshake).memory == Exported("here", 1, [b"h"], [])
    assert msgspec.msgpack.decode(told, type=PeerHandshake.__base__).agent_metadata_bytes == b"metadata"
