"""The request planes' messages per second, and CPU per message on both sides.

    python benchmarks/planes.py [--num-messages 300000] [--loop uvloop|asyncio]

One worker process and one caller process. Each step of the worker's engine yields a chunk of one token per
stream. The next step starts when all were taken: at once (a fast worker joins several steps in one frame), or
after 5 ms like an engine (each step is a frame, each chunk wakes its consumer). `none` iterates the same
generators without a plane, which is the lower bound.
NATS needs `nats-server` on the PATH. With BATON_PEER_CERT, _KEY and _CA set, `tcp` uses TLS. Compare ratios
of one run: figures vary by 20 to 40 % on a busy machine."""

import argparse
import asyncio
import contextlib
import functools
import itertools
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator

import uvloop

from baton.messages import GenerateRequest, Reply, Request, Sampling, TokenChunk
from baton.nats import NatsTransport
from baton.peer_tls import peer_tls
from baton.tcp import TcpTransport
from baton.transport import Transport

NUM_STREAMS = (1, 256)
STEPS_MS = (0, 5)


class SteppingEngine:
    """Yields one chunk per step to each running stream."""

    def __init__(self, step_ms: float) -> None:
        self._step_s = step_ms / 1000
        self._num_running = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def answer(self, request: Request) -> AsyncGenerator[Reply, None]:
        assert isinstance(request, GenerateRequest)
        loop = asyncio.get_running_loop()
        self._num_running += 1
        try:
            for token_id in range(request.sampling.max_tokens):
                step = loop.create_future()
                self._waiting.append(step)
                if len(self._waiting) == self._num_running:
                    loop.call_later(self._step_s, self._step)
                await step
                yield TokenChunk(token_ids=(token_id,))
        finally:
            self._num_running -= 1

    def _step(self) -> None:
        if len(self._waiting) >= self._num_running:
            waiting, self._waiting = self._waiting, []
            for step in waiting:
                if not step.done():
                    step.set_result(None)


def make_transport(url: str) -> Transport:
    return TcpTransport(tls=peer_tls()) if url == "tcp" else NatsTransport(url)


async def serve(url: str, step_ms: float) -> None:
    """The worker process: writes its address, then its CPU seconds for each line it reads."""
    transport = make_transport(url)
    async with transport.serve("bench", SteppingEngine(step_ms).answer) as address:
        print(address, flush=True)
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def on_line() -> None:
            if sys.stdin.readline():
                print(time.process_time(), flush=True)
            else:
                done.set()

        loop.add_reader(sys.stdin, on_line)
        await done.wait()
        loop.remove_reader(sys.stdin)
    await transport.close()


async def consume(stream: AsyncGenerator[Reply, None]) -> int:
    num_tokens = 0
    async for reply in stream:  # chunks that wait arrive as one
        if isinstance(reply, TokenChunk):
            num_tokens += len(reply.token_ids)
    return num_tokens


def make_request(num_tokens: int) -> GenerateRequest:
    sampling = Sampling(max_tokens=num_tokens, seed=0)
    return GenerateRequest(request_id="b", model="b", token_ids=[1], sampling=sampling, deadline_s=600)


class WorkerProcess:
    """The other process, and the CPU seconds it has used so far."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, __file__, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._line()

    def cpu_s(self) -> float:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return float(self._line())

    def stop(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


Call = Callable[[GenerateRequest], AsyncGenerator[Reply, None]]


async def measure(
    row: str, call: Call, num_streams: int, num_tokens: int, far_cpu_s: Callable[[], float]
) -> None:
    """Run the streams and print one row."""
    request = make_request(num_tokens)
    wall_s, near_s, far_s = time.perf_counter(), time.process_time(), far_cpu_s()
    counts = await asyncio.gather(*(consume(call(request)) for _ in range(num_streams)))
    used_s = time.perf_counter() - wall_s, far_cpu_s() - far_s, time.process_time() - near_s
    assert sum(counts) == num_streams * num_tokens
    per_message = [1e6 * seconds / sum(counts) for seconds in used_s]
    print(f"{row}{1e6 / per_message[0]:14,.0f}{per_message[1]:12.2f}{per_message[2]:12.2f}", flush=True)


async def measure_plane(
    plane: str, url: str, worker: WorkerProcess, step_ms: float, num_messages: int
) -> None:
    transport = make_transport(url)
    call = functools.partial(transport.call, worker.address)
    await consume(call(make_request(10)))
    for num_streams in NUM_STREAMS:
        num_tokens = int(2000 / step_ms) if step_ms else num_messages // num_streams
        row = f"{plane:>8}{num_streams:9}{step_ms:9}"
        await measure(row, call, num_streams, num_tokens, worker.cpu_s)
    await transport.close()


async def measure_none(num_messages: int) -> None:
    for num_streams in NUM_STREAMS:
        call = SteppingEngine(0).answer
        await measure(
            f"{'none':>8}{num_streams:9}{0:9}", call, num_streams, num_messages // num_streams, float
        )


@contextlib.contextmanager
def nats_server() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(["nats-server", "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
        yield f"nats://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num-messages", type=int, default=300_000)
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--step-ms", type=float, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    run = uvloop.run if options.loop == "uvloop" else asyncio.run
    if options.worker:
        run(serve(options.worker, options.step_ms))
        return
    print(f"{'plane':>8}{'streams':>9}{'step ms':>9}{'messages/s':>14}{'worker us':>12}{'caller us':>12}")
    run(measure_none(options.num_messages))
    with contextlib.ExitStack() as stack:
        urls = {"tcp": "tcp"}
        if shutil.which("nats-server"):
            urls["nats"] = stack.enter_context(nats_server())
        for (plane, url), step_ms in itertools.product(urls.items(), STEPS_MS):
            worker = WorkerProcess("--worker", url, "--loop", options.loop, "--step-ms", str(step_ms))
            run(measure_plane(plane, url, worker, step_ms, options.num_messages))
            worker.stop()


if __name__ == "__main__":
    main()
