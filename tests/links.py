"""Both ends of a link, connected without sockets."""

import asyncio
from collections.abc import AsyncGenerator, Callable

import msgspec
import pytest

from baton import frames
from baton.frames import Signal
from baton.messages import GenerateRequest, Reply, Request, TokenChunk
from baton.pace import Pace
from baton.streams import CallerLink, Plane, Service, WorkerLink
from tests.requests import token_request

PACE = Pace(tick_s=60.0, num_silent=4)


def a_request(max_tokens: int = 1, seed: int = 0, deadline_s: float = 9.0) -> GenerateRequest:
    return token_request([1], max_tokens=max_tokens, seed=seed, deadline_s=deadline_s)


class Sent:
    """A wire that records what is sent."""

    def __init__(self, max_frame_bytes: int = frames.MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.writable = asyncio.Event()
        self.writable.set()
        self.frames: list[bytes] = []
        self.closed = False

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)

    def close(self) -> None:
        self.closed = True


class Back(Sent):
    """A wire that delivers each frame to the other end in the next turn."""

    other: CallerLink | WorkerLink

    def send(self, frame: bytes) -> None:
        super().send(frame)
        asyncio.get_running_loop().call_soon(self.other.receive, frame)


class Linked(Plane):
    """A plane with this link, to `w`."""

    def __init__(self, link: CallerLink) -> None:
        super().__init__(liveness_s=9.0)
        self._links["w"] = link


class Pair:
    """A connected caller and worker."""

    def __init__(self, answer: Callable[[Request], AsyncGenerator[Reply, None]], limit: int = 10_000) -> None:
        self.service = Service("w", answer, PACE)
        self.to_worker, self.to_caller = Back(limit), Back(limit)
        self.caller = self.to_caller.other = CallerLink(self.to_worker, "w", PACE)
        self.worker = self.to_worker.other = WorkerLink(self.to_caller, self.service)

    def call(self, request: Request) -> AsyncGenerator[Reply, None]:
        return Linked(self.caller).call("w", request)


def frame(number: int, *signals: Signal) -> bytes:
    return msgspec.msgpack.encode((number, signals))


async def turns(until: Callable[[], bool]) -> None:
    """Run the event loop until the condition holds."""
    for _ in range(1000):
        if until():
            return
        await asyncio.sleep(0)  # turns are counted
    pytest.fail("the condition did not come true")


async def silent(_: Request) -> AsyncGenerator[Reply, None]:
    await asyncio.Event().wait()
    yield TokenChunk(token_ids=())


class RawCaller:
    """The worker's end of a link whose caller is the test."""

    def __init__(self, service: Service) -> None:
        self.wire = Sent()
        self.link = WorkerLink(self.wire, service)
        self._number = 0

    def say(self, *signals: Signal) -> None:
        self.link.receive(frame(self._number, *signals))
        self._number += 1

    def heard(self, kind: type[Signal]) -> list[Signal]:
        signals = [each for one in self.wire.frames for each in frames.FROM_WORKER.decode(one)[1]]
        return [each for each in signals if isinstance(each, kind)]
