"""Calls between frontend processes: metrics, snapshots, records of requests, background runs, reasoning."""

import asyncio
import secrets
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import BatonError, NotReady, WorkerLost
from baton.messages import FrontendReply, FrontendRequest, Reply, Request
from baton.tcp import UnixTransport
from frontend.metrics import Metrics, Samples, Scrape
from frontend.responses.runs import UNREACHED, ResponseState
from frontend.snapshot import Look, Part
from frontend.turn.thoughts import Kept, Thoughts
from frontend.verdict import Find, Found, find

SCRAPE_TIMEOUT_S = 1.0
SILENCE_S = 10.0
"""A process that is silent for this long is lost: frozen, or dead."""
MAX_SENDING = 10_000
"""Notifications on their way to other processes; more are dropped."""


class CallRun(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Answered by `ResponseState.answer`. Tags 1, 3 and 4 were other messages."""

    response_id: str
    sequence_number: int | None


Question = Scrape | Look | Find
SiblingRequest = Kept | CallRun | Question


def _token_ids(kind: type, value: object) -> object:
    if kind is array and isinstance(value, list):
        return array("I", value)
    raise NotImplementedError(kind)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=list)
_MESSAGES: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(SiblingRequest, dec_hook=_token_ids)
_DECODERS: dict[type[Question], msgspec.msgpack.Decoder[Any]] = {
    question: msgspec.msgpack.Decoder(kind)
    for question, kind in ((Scrape, Samples), (Look, Part), (Find, Found))
}


class Siblings:
    """This process, number `index` of its frontend's `num_processes`, among the others and those of other
    frontends. The frontend's name is its `folder`, or random with one process. Call `listening` once this
    process accepts connections."""

    def __init__(
        self,
        folder: Path | None = None,
        index: int = 0,
        num_processes: int = 1,
        listening: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder = folder
        self.listening = listening
        self._plane = UnixTransport(liveness_s=SILENCE_S)
        frontend = folder or f"baton-frontend-{secrets.token_hex(8)}"
        names = [f"{frontend}/{number}" for number in range(num_processes)]
        self._name = names.pop(index)
        self.address = self._plane.address(self._name)
        """Where other processes of this user reach this one."""
        self._others = [self._plane.address(name) for name in names]
        self._sending: set[asyncio.Task[bytes | None]] = set()

    @asynccontextmanager
    async def answering(
        self, thoughts: Thoughts, metrics: Metrics, responses: ResponseState, part: Callable[[int], Part]
    ) -> AsyncIterator[None]:
        """Let other processes read this one's state, or add to it."""

        async def answers(request: Request) -> AsyncGenerator[Reply, None]:
            assert isinstance(request, FrontendRequest), "frontends ask frontends"
            match _MESSAGES.decode(request.data):
                case Kept() as kept:
                    thoughts.take(kept)
                case Scrape():
                    yield FrontendReply(_ENCODER.encode(metrics.samples()))
                case Look(since_s):
                    yield FrontendReply(_ENCODER.encode(part(since_s)))
                case Find() as query:
                    yield FrontendReply(_ENCODER.encode(find(metrics.records, query)))
                case CallRun(response_id, sequence_number):
                    async with aclosing(responses.answer(response_id, sequence_number)) as found:
                        async for data in found:
                            yield FrontendReply(data)

        try:
            async with self._plane.serve(self._name, answers):
                yield
        finally:
            await self._plane.close()
            await asyncio.gather(*self._sending)

    def share(self, message: Kept) -> None:
        """Report an entry of reasoning to all processes that are running."""
        for address in self._others:
            if len(self._sending) < MAX_SENDING:
                task = asyncio.get_running_loop().create_task(self._answer(address, message))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def ask(self, question: Question) -> list[Any]:
        """The answers of the processes that give one in time: `frontend.metrics.Others`."""
        found = await asyncio.gather(
            *(self._answer(address, question, SCRAPE_TIMEOUT_S) for address in self._others)
        )
        return [_DECODERS[type(question)].decode(data) for data in found if data is not None]

    def call_run(
        self, address: str, response_id: str, sequence_number: int | None
    ) -> AsyncGenerator[bytes, None]:
        """`frontend.responses.runs.CallRun`."""
        return self._call(address, CallRun(response_id, sequence_number))

    async def _call(self, address: str, message: SiblingRequest) -> AsyncGenerator[bytes, None]:
        request = FrontendRequest(data=_ENCODER.encode(message))
        try:
            async with aclosing(self._plane.call(address, request)) as replies:
                async for reply in replies:
                    assert isinstance(reply, FrontendReply), "another frontend answers"
                    yield reply.data
        except WorkerLost as error:
            raise NotReady(UNREACHED, retry_after_s=1) from error

    async def _answer(
        self, address: str, message: SiblingRequest, limit_s: float | None = None
    ) -> bytes | None:
        with suppress(BatonError, TimeoutError):  # it is not running, or hangs
            async with asyncio.timeout(limit_s), aclosing(self._call(address, message)) as replies:
                return await anext(replies, None)
        return None
