"""Shared parts of the request plane tests: planes, requests, answers."""

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from baton.dynamo.plane import DynamoPlane
from baton.dynamo.runtime import start_runtime
from baton.errors import WorkerLost
from baton.messages import GenerateRequest, KvHandoff, Reply, Request, Sampling, TokenChunk, WorkerStats
from baton.nats import NatsTransport
from baton.tcp import TcpTransport, UnixTransport
from baton.transport import Respond, Transport
from tests.certificates import shared_peer
from tests.scripted_workers import worker
from tests.waiting import PATIENCE_S

Stream = AsyncGenerator[Reply, None]
LIVENESS_S = PATIENCE_S  # a machine that stands still for a moment is no fault
DYNAMO_PATH = "tests.worker.generate"
HANDOFF = KvHandoff(
    worker_id="w", incarnation="i", first_token=7, num_prompt_tokens=3, ttl_s=1.5, engine_state=b"\x00\xff"
)


class _ByNewNames(UnixTransport):
    """Tests that run at the same time serve workers of one name."""

    def _listen(self, worker_id: str) -> tuple[socket.socket, str, str]:
        return super()._listen(f"{worker_id}.{secrets.token_hex(8)}")


async def _no_stats(_: Request) -> Stream:
    yield WorkerStats()


class _Registering(DynamoPlane):
    """A worker is served once it is registered and its caller sees that."""

    peer: "_Registering"

    @asynccontextmanager
    async def serve(self, worker_id: str, respond: Respond) -> AsyncIterator[str]:
        card = worker(worker_id, endpoint=f"dyn://{DYNAMO_PATH}", model_path="models/demo")
        is_registered = False

        def answer(request: Request) -> Stream:
            return (respond if is_registered else _no_stats)(request)

        async with super().serve(worker_id, answer), self.register(card):
            is_registered = True
            async with aclosing(self.peer.watch()) as snapshots:
                async for snapshot in snapshots:
                    if snapshot:
                        break
            watching = asyncio.ensure_future(self.peer.follow())
            yield snapshot[0].address
            watching.cancel()

    async def follow(self) -> None:
        """Know what is registered."""
        async for _ in self.watch():
            pass


class Plane:
    """One plane, such as `tcp`, and how to make its transports."""

    def __init__(self, kind: str, nats_url: str) -> None:
        self.kind = kind
        self.nats_url = nats_url

    def transport(self, liveness_s: float = LIVENESS_S, **options: Any) -> Transport:
        """`options`: nats-py's."""
        if self.kind in ("tcp", "tls"):
            tls = shared_peer() if self.kind == "tls" else None
            return TcpTransport(liveness_s=liveness_s, tls=tls)
        if self.kind == "unix":
            return _ByNewNames(liveness_s=liveness_s)
        if self.kind.startswith("dynamo"):
            start = partial(start_runtime, "file", "127.0.0.1", {}, {})
            return _Registering(start, [DYNAMO_PATH], liveness_s)
        return NatsTransport(self.nats_url, liveness_s=liveness_s, **options)

    @asynccontextmanager
    async def ends(
        self, liveness_s: float = LIVENESS_S, **options: Any
    ) -> AsyncGenerator[tuple[Transport, Transport], None]:
        """A caller and a worker."""
        caller, worker = (self.transport(liveness_s, **options) for _ in range(2))
        if isinstance(caller, _Registering) and isinstance(worker, _Registering):
            worker.peer = caller
        async with asyncio.timeout(PATIENCE_S):
            try:
                yield caller, worker
            finally:
                await caller.close()
                await worker.close()


def a_request(max_tokens: int = 3, token_ids: list[int] | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id="r1",
        model="m",
        token_ids=token_ids or [1, 2, 3],
        sampling=Sampling(max_tokens=max_tokens, seed=2**63 - 1, logit_bias={5: -1.5}, stop_token_ids=(9,)),
        deadline_s=PATIENCE_S,
        handoff=HANDOFF,
    )


async def count_up(request: Request) -> Stream:
    """As many chunks as requested, each with its index as its token."""
    assert isinstance(request, GenerateRequest)
    for token_id in range(request.sampling.max_tokens):
        yield TokenChunk(token_ids=(token_id,))


async def flood(_: Request) -> Stream:
    """Chunks of 100,000 tokens without end."""
    while True:
        yield TokenChunk(token_ids=(1,) * 100_000)
        await asyncio.sleep(0)  # let other tasks run


async def eventually(call: Callable[[], Stream]) -> list[int]:
    """The tokens of the first of these calls whose worker is not lost."""
    while True:
        try:
            return await tokens(call())
        except WorkerLost:
            await asyncio.sleep(0.05)  # its link or its subscription returns soon


async def tokens(stream: Stream) -> list[int]:
    """The tokens of all chunks."""
    return [i async for reply in stream if isinstance(reply, TokenChunk) for i in reply.token_ids]


async def first_tokens(stream: Stream, num_tokens: int) -> list[int]:
    """The tokens of the first chunks that have at least this many."""
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        reply = await anext(stream)
        assert isinstance(reply, TokenChunk)
        token_ids += reply.token_ids
    return token_ids


class Endless:
    """Yields a chunk, then waits forever; reports when it runs and when it is closed, which ends if it
    `may_close`."""

    def __init__(self, num_replies: int = 1) -> None:
        self.running = asyncio.Event()
        self.closed = asyncio.Event()
        self.may_close = asyncio.Event()
        self.may_close.set()
        self._num_replies = num_replies

    async def answer(self, _: Request) -> Stream:
        try:
            self.running.set()
            for token_id in range(self._num_replies):
                yield TokenChunk(token_ids=(token_id,))
            await asyncio.Event().wait()
        finally:
            self.closed.set()
            await self.may_close.wait()
