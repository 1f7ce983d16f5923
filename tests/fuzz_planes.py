"""Fuzzes a running stack's sockets, handoffs and registry: `python -m tests.fuzz_planes --messages 1000000`.

Most messages are valid ones with a few changed bytes, from unknown callers and from those that know the
worker's name. Meanwhile streams run. Nothing may end a process or change a stream; the unknown are counted.
"""

import argparse
import asyncio
import fcntl
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from baton import frames
from baton.errors import BatonError
from baton.files import FilesDiscovery
from baton.messages import GenerateRequest, KvAsk, KvConfirm, KvHandoff, Role, StatsRequest, WorkerInfo
from baton.tcp import TcpTransport
from tests.chaos.load import Load, Outcome, asks, expected_of
from tests.requests import token_request
from tests.stack import Stack, running_stack
from workers.kv.transceiver import Ticket

_STREAMS = 2
_AT_ONCE = 16
_ANSWER_S = 0.05
_INTERESTING = (b"\x00", b"\xff", b"\xc1", b"\x80", b"\xdf\xff\xff\xff\xff", b"\xdd\x00\x00\x00\x02")


class Mutations:
    """Changed copies of valid messages, by a seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def of(self, message: bytes) -> bytes:
        """With up to four changes; one in sixteen has none."""
        changed = bytearray(message)
        for _ in range(self._chance.randrange(8) // 2 + (self._chance.random() < 0.75)):
            at = self._chance.randrange(len(changed) + 1)
            match self._chance.randrange(4):
                case 0:
                    changed[at : at + 1] = bytes([self._chance.randrange(256)])
                case 1:
                    changed[at:at] = self._chance.choice(_INTERESTING)
                case 2:
                    del changed[at : at + self._chance.randrange(1, 9)]
                case _:
                    changed[at:at] = changed[: self._chance.randrange(len(changed) + 1)][-64:]
        return bytes(changed)

    def pick(self, messages: list[bytes]) -> bytes:
        """One of them, changed."""
        return self.of(self._chance.choice(messages))


async def to_socket(host: str, port: int, pieces: list[bytes]) -> None:
    """Send a connection's messages, and read what comes for a moment."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return
    with closing(writer), suppress(OSError, TimeoutError):
        writer.writelines(pieces)
        async with asyncio.timeout(_ANSWER_S):
            while await reader.read(1 << 16):
                pass


def frames_of(address: str, secret: bytes, mutations: Mutations, num: int) -> list[bytes]:
    """A connection to the request plane or to a worker's KV: half of the callers know the worker's name."""
    name = urlsplit(address).path.removeprefix("/")
    hello = framed(0, frames.Hello(frames.VERSION, name))
    request = token_request([1, 2, 3], max_tokens=2, deadline_s=1)
    messages = [
        hello,
        framed(1, frames.Open(1, request)),
        framed(2, frames.Open(2, StatsRequest()), frames.Credit(1, 5)),
        framed(3, frames.Cancel(1), frames.Beat()),
        framed(1, frames.Open(1, KvAsk(1, secret, 100)), frames.Open(2, KvAsk(2, secret, 1 << 40, True))),
        framed(1, frames.Open(1, KvConfirm(1, secret, 100))),
        framed(1, frames.Goodbye("over")),
    ]
    first = [hello] if num % 2 else []
    return first + [mutations.pick(messages) for _ in range(num - len(first))]


def framed(number: int, *envelopes: object) -> bytes:
    """A frame as it goes over TCP."""
    return frames.with_length(msgspec.msgpack.encode((number, envelopes)))


async def handed_over(transport: TcpTransport, prefill: WorkerInfo, request: GenerateRequest) -> KvHandoff:
    """A real handoff, whose KV is given back at once."""
    async with aclosing(transport.call(prefill.address, request)) as replies:
        handoff = await anext(replies)
    assert isinstance(handoff, KvHandoff)
    return handoff


def ticket_of(handoff: KvHandoff) -> Ticket:
    """The ticket in an engine's state, which is an array."""
    for part in msgspec.msgpack.decode(handoff.engine_state):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(part, Ticket)
    raise AssertionError("no ticket in the handoff")


async def with_handoff(
    transport: TcpTransport, decode: WorkerInfo, request: GenerateRequest, handoff: KvHandoff
) -> None:
    """Ask decode to go on with it; that it fails is right."""
    decoding = msgspec.structs.replace(request, handoff=handoff)
    with suppress(BatonError):
        async with aclosing(transport.call(decode.address, decoding)) as replies:
            async for _ in replies:
                pass


@contextmanager
def registered(folder: Path, name: str, content: bytes) -> Iterator[None]:
    """A registration with that content, for a moment."""
    path = folder / f"{name}.json"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, content)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


async def fuzz(stack: Stack, num_messages: int, seed: int) -> Counter[str]:
    """Send this many messages; returns how many of which kind."""
    folder = Path(stack.environ["BATON_FILE_REGISTRY"])
    async with aclosing(FilesDiscovery(folder).watch()) as snapshots:
        workers = await anext(found async for found in snapshots if len(found) == 2)
    by_role = {worker.role: worker for worker in workers}
    prefill, decode = by_role[Role.PREFILL], by_role[Role.DECODE]
    transport, mutations, sent = TcpTransport(), Mutations(seed), Counter[str]()
    request = token_request(range(20, 40), model=prefill.model, max_tokens=3, seed=1, deadline_s=5)
    handoff = await handed_over(transport, prefill, request)
    ticket = ticket_of(handoff)
    chance = random.Random(seed)

    async def client() -> None:
        while sent.total() < num_messages:
            num = chance.randrange(2, 64)
            match chance.randrange(8):
                case 0:
                    sent["tickets"] += 1
                    changed = {"engine_state": mutations.of(handoff.engine_state)}
                    if chance.random() < 0.3:
                        changed = {"engine_state": handoff.engine_state}
                    strange = msgspec.structs.replace(
                        handoff, first_token=chance.choice([0, 17, 2**40]), **changed
                    )
                    await with_handoff(transport, decode, request, strange)
                case 1:
                    sent["registrations"] += 1
                    with registered(
                        folder, f"s{num}-{chance.random()}", mutations.of(msgspec.json.encode(decode))
                    ):
                        await asyncio.sleep(0.1)  # the registry's poll
                case _:
                    sent["frames"] += num
                    address = chance.choice([ticket.address, *(worker.address for worker in workers)])
                    parts = urlsplit(address)
                    pieces = frames_of(address, ticket.secret, mutations, num)
                    await to_socket(str(parts.hostname), int(parts.port or 0), pieces)

    await asyncio.gather(*(client() for _ in range(_AT_ONCE)))
    await transport.close()
    return sent


def run(folder: Path, engine: str, num_messages: int, seed: int) -> tuple[Counter[str], list[Outcome], float]:
    """What was sent to a new stack, the streams that ran meanwhile, and how many messages were found strange.
    Raises AssertionError if a process ended or is not well afterwards."""
    with running_stack(folder, engine) as stack:
        expected = expected_of(stack.url, asks(seed, 60, 100))
        pids = [process.popen.pid for process in stack.processes]
        load = Load(stack.url, expected, _STREAMS, seed)
        load.wait_running()
        try:
            sent = asyncio.run(fuzz(stack, num_messages, seed))
        finally:
            outcomes = load.stop()
        assert [process.popen.pid for process in stack.processes if process.popen.poll() is None] == pids
        assert expected_of(stack.url, list(expected)) == expected
        stack.wait_idle(60)
        for process in stack.processes:
            assert "Traceback" not in process.text(), process.text()[-5000:]
        return sent, outcomes, stack.gauge("baton_worker_unauthenticated_messages_total")


def main() -> int:
    """Exit status: 0 if no process ended and every stream was exact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--engine", choices=["mocker", "embedded"], default="mocker")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    flags = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    sys.stdout.write(f"seed {flags.seed}, logs in {folder}\n")
    sent, outcomes, num_strange = run(folder, flags.engine, flags.messages, flags.seed)
    ends = Counter(outcome.end for outcome in outcomes)
    sys.stdout.write(f"sent {dict(sent)}; strange {num_strange:.0f}; streams {dict(ends)}\n")
    return int(set(ends) != {"exact"})


if __name__ == "__main__":
    sys.exit(main())
