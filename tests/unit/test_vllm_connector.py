"""Baton's connector for vLLM: what it reads from mapped memory, what goes over NIXL, and failed reads."""

import contextlib
import dataclasses
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

from tests.waiting import PATIENCE_S
from workers.engines.vllm.patches import NUM_TOKENS, connector
from workers.engines.vllm.patches.connector import PeerConnector, PeerHandshake, PeerWorker, offered_memory
from workers.engines.vllm.patches.peer_memory import Exported, place

HOST = "127.0.0.1"
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

    def copy(self, to_blocks: list[int], from_blocks: list[int]) -> Copied:
        self.copies.append(Copied(to_blocks, from_blocks))
        return self.copies[-1]


@pytest.fixture(params=["0.25.1", "0.26.0"], autouse=True)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of vLLM: each release that Baton was tried with."""
    monkeypatch.setattr("vllm.__version__", request.param)
    return str(request.param)


def question() -> list[object]:
    """What a worker of the only rank is asked."""
    has_stages = not vllm.__version__.startswith("0.25.")
    return [GET_META_MSG, 0, 0] if has_stages else [GET_META_MSG, 0]


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
        memory = Exported(where or place(), owner_pid, [], [])
        offered = msgspec.msgpack.encode(PeerHandshake("hash", b"metadata", memory))
        with side_channel(lambda asked: offered if asked == question() else b"") as port:
            self._nixl_handshake(HOST, port, 1, "prefill")

    def read(self, request_id: str, ours: list[list[int]], theirs: list[list[int]]) -> None:
        spec = SimpleNamespace(remote_rank=0, local_block_ids=ours, remote_block_ids=theirs)
        ids = {"request_id": request_id, "remote_request_id": f"{request_id}-there"}
        self._read_blocks(read_spec=spec, dst_engine_id="prefill", **ids, local_xfer_side_handle=1)

    @property
    def over_nixl(self) -> list[str]:
        return list(self._recving_transfers)


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
    assert decode.notices == [("prefill-0", b"one-there:1")]
    (peer,) = decode._peers.values()  # noqa: SLF001  the worker's own
    decode.introduce(prefill.pid)  # NIXL had forgotten it
    decode.read("two", [[7]], [[1]])
    assert list(decode._peers.values()) == [peer]  # noqa: SLF001  mapped once
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
    other: Any = SimpleNamespace()  # a worker whose KV is read all the time
    decode._reads["other"] = connector._Read(other, Copied([], []), b"")  # noqa: SLF001  the worker's own
    assert decode.get_finished()[1] == {"one"}
    assert decode.failed == ["one"]
    assert decode.notices == []
    decode.read("two", [[2]], [[2]])
    assert decode.over_nixl == ["two"]  # its memory is unmapped


@pytest.mark.parametrize(
    ("num_kept", "num_computed", "held_s", "silent_s", "num_read"),
    [(12, 4, 0, 60, 6), (8, 4, 60, 24, 4), (8, 8, 0, 0, 0), (4, 8, 0, 0, 0), (12, 4, 60, 60, 0)],
)
def test_what_decode_lacks_of_a_prompt_is_read_unless_prefill_may_have_missed_its_heartbeats(
    num_kept: int, num_computed: int, held_s: float, silent_s: float, num_read: int
) -> None:
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="engine"))
    decode = PeerConnector(config, KVConnectorRole.SCHEDULER, None)
    decode.connector_scheduler._last_heartbeat_time = time.perf_counter() - silent_s  # noqa: SLF001  NIXL's
    params = {"do_remote_prefill": True, NUM_TOKENS: num_kept}
    arrival_s = time.time() - held_s
    request = SimpleNamespace(kv_transfer_params=params, num_prompt_tokens=10, arrival_time=arrival_s)
    assert decode.get_num_new_matched_tokens(request, num_computed) == (num_read, num_read > 0)


@contextlib.contextmanager
def side_channel(answer: Callable[[Any], bytes | None]) -> Iterator[int]:
    """A port where each question gets this answer; None: no answer."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer:
                        asked = peer.recv(int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "big"))
                        if (message := answer(msgspec.msgpack.decode(asked))) is not None:
                            peer.sendall(len(message).to_bytes(4, "big") + message)
                        peer.recv(1)  # until it is closed

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    "answer",
    [b"", b"\xc1", b"\xff\xff", msgspec.msgpack.encode({"memory": 7}), None],
    ids=["empty", "no msgpack", "rest", "odd", "silent"],
)
def test_a_peer_that_tells_nothing_usable_offers_nothing(
    answer: bytes | None, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "_ANSWER_MS", 50 if answer is None else PATIENCE_S * 1000)
    with side_channel(lambda _: answer) as port:
        assert offered_memory(HOST, port, (0,)) is None
        worker = PeerWorker(None, "decode", None)
        names = worker._nixl_handshake(HOST, port, 1, "prefill")  # noqa: SLF001  NIXL's
        assert names == ({0: "prefill-0"} if version == "0.25.1" else ({(0, 0): "prefill-0"}, 0.5))
    assert not worker._offered  # noqa: SLF001  as above
