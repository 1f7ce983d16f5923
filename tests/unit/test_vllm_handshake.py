"""What a prefill worker offers on NIXL's side channel: asked for per rank, and done without."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlHandshakePayload

from tests.waiting import PATIENCE_S
from workers.engines.vllm.patches import connector
from workers.engines.vllm.patches.connector import PeerHandshake, PeerWorker, offered_memory
from workers.engines.vllm.patches.peer_memory import Exported, Region, place

HOST = "127.0.0.1"


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
                        if (told := answer(msgspec.msgpack.decode(asked))) is not None:
                            peer.sendall(len(told).to_bytes(4, "big") + told)
                        peer.recv(1)  # until it is closed

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE_S)


def offer(rank: int) -> Exported:
    return Exported(place(), 1000 + rank, [bytes(64)], [Region(0, rank)])


def told(rank: int) -> bytes:
    return msgspec.msgpack.encode(PeerHandshake("hash", b"metadata", offer(rank)))


def test_each_rank_of_prefill_is_asked_for_its_own_memory() -> None:
    asked: list[list[Any]] = []

    def answer(question: list[Any]) -> bytes:
        asked.append(question)
        return told(question[1])

    worker = PeerWorker(None, "decode", None)
    with side_channel(answer) as port:
        assert worker._nixl_handshake(HOST, port, 2, "prefill") == {0: "prefill-0", 1: "prefill-1"}  # noqa: SLF001  NIXL's
    assert asked == [[GET_META_MSG, 0], [GET_META_MSG, 1]]
    assert worker._offered == {("prefill", rank): offer(rank) for rank in range(2)}  # noqa: SLF001  mapped with a GPU only


@pytest.mark.parametrize(
    "answer",
    [b"", b"\xc1", b"\xff\xff", msgspec.msgpack.encode({"memory": 7}), None],
    ids=["empty", "no msgpack", "rest", "odd", "silent"],
)
def test_a_peer_that_tells_nothing_usable_offers_nothing(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "_ANSWER_MS", 50 if answer is None else PATIENCE_S * 1000)
    with side_channel(lambda _: answer) as port:
        assert offered_memory(HOST, port, 0) is None
        worker = PeerWorker(None, "decode", None)
        assert worker._nixl_handshake(HOST, port, 1, "prefill") == {0: "prefill-0"}  # noqa: SLF001  NIXL's
    assert not worker._offered  # noqa: SLF001  as above


def test_a_worker_of_nixls_own_offers_nothing() -> None:
    plain = msgspec.msgpack.encode(NixlHandshakePayload("hash", b"metadata"))
    with side_channel(lambda _: plain) as port:
        assert offered_memory(HOST, port, 0) is None


def test_a_peer_that_is_gone_is_not_waited_for() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    assert offered_memory(HOST, port, 0) is None
