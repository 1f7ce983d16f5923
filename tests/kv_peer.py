"""A process with one cache transceiver, controlled by a test: the remote peer.

Started as `python -m tests.kv_peer tcp|tls|ucx|ucx-stream`; one JSON command per line on stdin, one answer
per line."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import IO
from urllib.parse import urlsplit

import msgspec
import pytest

from baton.errors import HandoffFailed
from tests.certificates import shared_peer
from tests.waiting import PATIENCE_S, signal_process
from workers.kv.memory import Memory, host_memory
from workers.kv.transceiver import CacheTransceiver, Ticket, choose_transceiver

LARGE_BYTES = 128 << 20
KINDS = ("tcp", "tls", "ucx", "ucx-stream")

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu13") is None, reason="nixl_cu13 is not installed"
)
WIRES = [pytest.param(kind, marks=[needs_nixl] if kind.startswith("ucx") else []) for kind in KINDS]


def open_transceiver(kind: str) -> CacheTransceiver:
    """A transceiver, not started; `ucx-stream` is UCX on a machine that can read nothing directly."""
    if kind == "ucx-stream":
        os.environ["UCX_TLS"] = "tcp,self"
    else:
        os.environ.pop("UCX_TLS", None)
    if kind == "tls":
        return choose_transceiver("TCP", tls=shared_peer())
    return choose_transceiver(kind.partition("-")[0].upper())


def pattern(num_bytes: int, seed: int) -> bytearray:
    """Bytes that depend on position and seed."""
    block = bytearray(zlib.crc32(bytes([seed % 256, i % 256])) % 256 for i in range(4093))
    return (block * (num_bytes // len(block) + 1))[:num_bytes]


def on_device(payload: bytearray, device: int) -> Memory:
    """A copy of the bytes on a CUDA device; `owner` is the tensor."""
    import torch  # noqa: PLC0415  slow to load, for GPU tests only

    tensor = torch.frombuffer(payload, dtype=torch.uint8).to(f"cuda:{device}")
    torch.cuda.synchronize(device)
    return Memory(address=tensor.data_ptr(), num_bytes=len(payload), device_index=device, owner=tensor)


class Command(msgspec.Struct, frozen=True):
    """`do` is offer, withdraw, pull, pulled, ping or quit; the other fields are its arguments."""

    do: str
    num_bytes: int = 0
    seed: int = 0
    deadline_s: float = PATIENCE_S
    ticket: Ticket | None = None
    device: int | None = None


class Answer(msgspec.Struct, frozen=True):
    """`error` is set if a pull failed; `cpu_s`, `num_fds`, `num_threads` are this process's."""

    ticket: Ticket | None = None
    error: str | None = None
    intact: bool = False
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    num_fds: int = 0
    num_threads: int = 0


class Peer:
    """Executes commands in order; a pull runs in the background until `pulled` waits for it."""

    def __init__(self, transceiver: CacheTransceiver) -> None:
        self._transceiver = transceiver
        self._pull: asyncio.Task[Answer] | None = None

    async def carry_out(self, command: Command) -> Answer:
        if command.do == "offer":
            payload = pattern(command.num_bytes, command.seed)
            memory = host_memory(payload) if command.device is None else on_device(payload, command.device)
            return Answer(ticket=self._transceiver.offer(memory))
        if command.do == "withdraw" and command.ticket:
            self._transceiver.withdraw(command.ticket)
        elif command.do == "pull":
            self._pull = asyncio.create_task(self._pulling(command))
        elif command.do == "pulled" and self._pull:
            return await self._pull
        return Answer(
            cpu_s=time.process_time(),
            num_fds=len(os.listdir("/proc/self/fd")),
            num_threads=threading.active_count(),
        )

    async def _pulling(self, command: Command) -> Answer:
        assert command.ticket
        buffer = bytearray(command.ticket.num_bytes)
        start = time.monotonic()
        try:
            await self._transceiver.pull(command.ticket, host_memory(buffer), command.deadline_s)
        except HandoffFailed as error:
            return Answer(error=error.message, elapsed_s=time.monotonic() - start)
        elapsed_s = time.monotonic() - start
        return Answer(intact=buffer == pattern(len(buffer), command.seed), elapsed_s=elapsed_s)


async def serve(kind: str, commands: IO[bytes], answers: IO[bytes]) -> None:
    """Start the transceiver, announce it, and execute commands until quit or until the parent dies."""
    transceiver = open_transceiver(kind)
    await transceiver.start()
    peer = Peer(transceiver)
    answer = Answer()
    while True:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()
        line = await asyncio.to_thread(commands.readline)
        if not line:
            break
        command = msgspec.json.decode(line, type=Command)
        if command.do == "quit":
            break
        answer = await peer.carry_out(command)
    await transceiver.close()


class Far:
    """The parent's handle of such a process."""

    def __init__(self, kind: str, *prefix: str) -> None:
        self.kind = kind
        words = [*prefix, sys.executable, "-m", "tests.kv_peer", kind]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def started(self) -> "Far":
        self._answer()
        return self

    async def ask(self, command: Command) -> Answer:
        """Send one command and read its answer."""
        return await asyncio.to_thread(self._ask, command)

    async def begin_pull(self, ticket: Ticket, seed: int = 0, deadline_s: float = PATIENCE_S) -> None:
        await self.ask(Command("pull", ticket=ticket, seed=seed, deadline_s=deadline_s))

    async def end_of_pull(self) -> Answer:
        return await self.ask(Command("pulled"))

    async def pull(self, ticket: Ticket, seed: int = 0, deadline_s: float = PATIENCE_S) -> Answer:
        """A whole pull."""
        await self.begin_pull(ticket, seed, deadline_s)
        return await self.end_of_pull()

    async def offer(self, num_bytes: int, seed: int = 0, device: int | None = None) -> Ticket:
        answer = await self.ask(Command("offer", num_bytes=num_bytes, seed=seed, device=device))
        assert answer.ticket
        return answer.ticket

    def signal(self, number: signal.Signals) -> None:
        signal_process(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _ask(self, command: Command) -> Answer:
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(command) + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Answer:
        assert self.process.stdout
        return msgspec.json.decode(self.process.stdout.readline(), type=Answer)


def readers_of(transceiver: CacheTransceiver, ticket: Ticket) -> int:
    """The number of active pullers of an offer, which no public method shows."""
    return transceiver._offers[ticket.offer_id].num_readers  # noqa: SLF001  only tests need it


def place_of(ticket: Ticket) -> tuple[str, int]:
    """Where its source listens."""
    url = urlsplit(ticket.address)
    assert url.hostname
    assert url.port
    return url.hostname, url.port


@contextlib.contextmanager
def victim(kind: str, *prefix: str) -> Iterator[Far]:
    """A process to be killed; `prefix` is a command that runs it."""
    process = Far(kind, *prefix)
    try:
        yield process.started()
    finally:
        process.end()


@contextlib.asynccontextmanager
async def near(kind: str | CacheTransceiver) -> AsyncIterator[CacheTransceiver]:
    """A transceiver in this process."""
    transceiver = open_transceiver(kind) if isinstance(kind, str) else kind
    await transceiver.start()
    try:
        yield transceiver
    finally:
        await transceiver.close()


async def pulled(there: CacheTransceiver, ticket: Ticket) -> bytes:
    """The bytes of an offer."""
    into = bytearray(ticket.num_bytes)
    await there.pull(ticket, host_memory(into), PATIENCE_S)
    return bytes(into)


async def failure(pull: "asyncio.Task[None]") -> float:
    """Seconds until the pull fails with HandoffFailed."""
    start = time.monotonic()
    with pytest.raises(HandoffFailed):
        await pull
    return time.monotonic() - start


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.stdin.buffer, sys.stdout.buffer))
