"""The engine's end of the sockets of form processes, over a server that the test plays."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import msgspec
import pytest

from baton.errors import BatonError, InvalidRequest, Overloaded
from baton.messages import Guided
from tests.guided import answer_form, handed_over
from workers.engines.embedded.grammar import Grammars, _Server
from workers.engines.embedded.grammar_server import BUSY, MAX_MESSAGE_BYTES, Verdict

VOCAB_SIZE = 8


@contextlib.contextmanager
def served() -> Iterator[tuple[Grammars, socket.socket]]:
    """Grammars, and the server's end of their socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    class Server(_Server):
        def __init__(self) -> None:
            self._starting = asyncio.Lock()
            self._control = ours

        def close(self) -> None:
            """Nothing runs."""

    with ours, theirs:
        theirs.setblocking(False)
        grammars = Grammars(Server(), VOCAB_SIZE)
        yield grammars, theirs
        grammars.close()


@pytest.mark.parametrize(
    ("reply", "refusal"),
    [
        (BUSY, Overloaded("No process", retry_after_s=1.0)),
        (
            msgspec.msgpack.encode(Verdict("It is endless.", "tools[1]")),
            InvalidRequest("It", param="tools[1]"),
        ),
        (None, Overloaded("Too many schemas", retry_after_s=1.0)),
    ],
)
async def test_a_form_that_is_not_compiled_is_refused_and_its_socket_closed(
    reply: bytes | None, refusal: BatonError, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reply is None:
        monkeypatch.setattr("workers.engines.embedded.grammar._PATIENCE_S", 0.01)
    with served() as (grammars, server):
        asking = asyncio.create_task(grammars.matcher(answer_form({})))
        with await handed_over(server) as process:
            if reply is not None:
                process.send(reply)
            with pytest.raises(type(refusal), match=refusal.message) as refused:
                await asking
            assert refused.value.param == refusal.param
            assert refused.value.retry_after_s == refusal.retry_after_s
            process.setblocking(False)
            assert msgspec.msgpack.decode(process.recv(MAX_MESSAGE_BYTES), type=Guided) == answer_form({})
            assert process.recv(1) == b""


async def test_a_form_whose_process_ends_is_too_large_and_not_compiled_again() -> None:
    with served() as (grammars, server):
        asking = asyncio.create_task(grammars.matcher(answer_form({})))
        (await handed_over(server)).close()
        for each in (asking, grammars.matcher(answer_form({}))):
            with pytest.raises(InvalidRequest, match="CPU time"):
                await each
