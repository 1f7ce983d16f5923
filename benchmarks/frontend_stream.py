"""CPU of the frontend's HTTP half per streamed token: a scripted engine in, a socket (or nothing) out.

    python benchmarks/frontend_stream.py [--streams 64] [--tokens 500] [--tokens-per-chunk 1]
                                         [--steps-per-s 50] [--profile]

`app` calls the ASGI app with a `send` that drops the bytes; `server` serves it to a
client in another process, whose CPU is not counted. The engine yields one chunk per stream and step, like
workers, and does not wait: everything ready goes out in one write. The cost of waking the streams is
measured with a reader that only counts, and subtracted."""

import argparse
import asyncio
import cProfile
import json
import pstats
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))
import benchmarks  # noqa: F401  checks the packages
from baton.messages import GenerateRequest, TokenChunk, Usage
from frontend.http.server import HttpServer
from frontend.record import Leg
from tests.scripted_frontend import MODEL, TOKENIZER, Client, ScriptedTokens

HEADER = TOKENIZER.encode_text("<|channel|>final<|message|>", allow_special=True)
TEXT = tuple(TOKENIZER.encode_text("The quick brown fox jumps over the lazy dog. "))


class SteppedTokens(ScriptedTokens):
    """All streams get a chunk per step, `steps_per_s` times a second, whether or not they keep up."""

    def __init__(self, num_tokens: int, tokens_per_chunk: int, steps_per_s: float) -> None:
        super().__init__("")
        self.num_tokens = num_tokens
        self.tokens_per_chunk = tokens_per_chunk
        self.steps_per_s = steps_per_s
        self.num_steps = 0
        self.waiting: list[asyncio.Future[None]] = []

    async def generate(
        self,
        request: GenerateRequest,
        caller: str = "",  # noqa: ARG002  the protocol's
        on_taken: Callable[[], None] = lambda: None,
        leg: Leg | None = None,  # noqa: ARG002  the protocol's
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield a chunk for each completed step."""
        on_taken()
        first_step = self.num_steps
        yield TokenChunk(token_ids=tuple(HEADER))
        for i in range(self.num_tokens // self.tokens_per_chunk):
            if first_step + i >= self.num_steps:
                future = asyncio.get_running_loop().create_future()
                self.waiting.append(future)
                await future
            yield TokenChunk(token_ids=TEXT[: self.tokens_per_chunk])
        yield TokenChunk(token_ids=(), finish_reason="length", usage=Usage(len(request.token_ids), 0, 0))

    async def run(self) -> None:
        """The engine's clock."""
        began = time.monotonic() - self.num_steps / self.steps_per_s
        while True:
            await asyncio.sleep(0.5 / self.steps_per_s)  # twice per simulated engine step
            self.num_steps = int((time.monotonic() - began) * self.steps_per_s)
            waiting, self.waiting = self.waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


async def cpu_of(work: Callable[[], Awaitable[object]], engine: SteppedTokens) -> float:
    """Process CPU seconds while the work runs."""
    running = asyncio.create_task(engine.run())
    began = time.process_time()
    await work()
    spent = time.process_time() - began
    running.cancel()
    return spent


async def main(args: argparse.Namespace) -> None:
    """Print a line for each output path."""
    engine = SteppedTokens(args.tokens, args.tokens_per_chunk, args.steps_per_s)
    client = Client(engine)
    num_tokens = args.streams * args.tokens

    async def count_only() -> None:
        async def one() -> None:
            request = GenerateRequest(request_id="", model="", token_ids=[], sampling=None, deadline_s=1)  # type: ignore[arg-type]  # it is not looked at
            async for _ in engine.generate(request):
                pass

        await asyncio.gather(*(one() for _ in range(args.streams)))

    async def app() -> None:
        await asyncio.gather(*(client.chat(stream=True) for _ in range(args.streams)))

    async def served() -> None:
        server = HttpServer(client.app, drain_timeout_s=1.0)
        server.start(socket.create_server(("127.0.0.1", args.port)))
        command = [
            sys.executable,
            __file__,
            "--client",
            "--streams",
            str(args.streams),
            "--port",
            str(args.port),
        ]
        reader = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await reader.communicate()
        print("client got", out.decode().strip())
        await server.drain()

    await cpu_of(app, engine)
    base = await cpu_of(count_only, engine)
    for name, work in (("app", app), ("server", served)):
        profile = cProfile.Profile()
        if args.profile:
            profile.enable()
        spent = await cpu_of(work, engine)
        if args.profile:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)
        print(
            f"{name}: {1e6 * (spent - base) / num_tokens:.2f} us CPU per token "
            f"({args.streams} streams x {args.tokens} tokens, {args.tokens_per_chunk} per chunk, "
            f"{args.steps_per_s:g} steps/s; waking them: "
            f"{1e6 * base / num_tokens:.2f} us, subtracted)"
        )


async def read_streams(num_streams: int, port: int) -> None:
    """The client: reads every stream to its end."""
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    ).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        num_bytes = 0
        while data := await reader.read(65536):
            num_bytes += len(data)
        writer.close()
        return num_bytes

    print(sum(await asyncio.gather(*(one() for _ in range(num_streams)))), "bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--steps-per-s", type=float, default=50)
    parser.add_argument("--port", type=int, default=28731)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    uvloop.run(read_streams(given.streams, given.port) if given.client else main(given))
