"""What a short request costs a frontend: its calls (C functions included) over TCP, and its record alone.

    python -m benchmarks.request_calls [--requests 200] [--rounds 5] [--top 0]

The calls are those of a whole frontend with two mockers (`cProfile`), a chat of 8 tokens at a time, so that
heartbeats and timers between two requests count too; each round has requests of its own. The record's cost is
that of `Metrics.begin` to `end` with stages and metrics: the best of 200 batches, so that other work on the
machine does not count."""

import argparse
import cProfile
import http.client
import json
import pstats
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from baton.messages import KvHandoff, Role, TokenChunk, Usage
from frontend.__main__ import main as frontend
from frontend.metrics import Metrics
from tests.registry import worker
from tests.stack import MODEL, Stack
from tests.waiting import wait_for

PREFILL = worker("prefill-0")
DECODE = msgspec.structs.replace(PREFILL, worker_id="decode-0", role=Role.DECODE)
HANDOFF = KvHandoff(
    first_token=1, num_prompt_tokens=1, ttl_s=9, engine_state=b"", waited_s=0.001, computed_s=0.002
)
FIRST = TokenChunk((1,), None, Usage(1, 0, 1, 8, 0.001, 0.001, 0.0, 0.0))
LAST = Usage(1, 0, 8, 8)


def profiled(folder: str, arguments: list[str]) -> int:
    """A frontend that counts its calls between SIGUSR1 and SIGUSR2, and then writes them."""
    profile, num = cProfile.Profile(), 0

    def write(*_: object) -> None:
        nonlocal num
        profile.disable()
        num += 1
        profile.dump_stats(f"{folder}/part")
        Path(folder, "part").rename(Path(folder, f"{num}.profile"))
        profile.clear()

    signal.signal(signal.SIGUSR1, lambda *_: profile.enable())
    signal.signal(signal.SIGUSR2, write)
    return frontend(arguments)


def counted(options: argparse.Namespace) -> None:
    """Print the calls of a request, streamed and whole, in each round."""
    with tempfile.TemporaryDirectory() as name, Stack(Path(name)) as stack:
        mine = ["--frontend", name, "--http-port", str(stack.port)]
        process = stack.start("frontend", "benchmarks.request_calls", *mine)
        instant = Path(name, "instant.yaml")
        instant.write_text("prefill_tokens_per_s: 1.0e+9\nkv_transfer_ms: 0\ndecode_step_ms: 0\n")
        for role in ("prefill", "decode"):
            stack.worker(role, yaml=instant)
        stack.wait_ready(1, 1)
        found: dict[bool, list[int]] = {True: [], False: []}
        for number in range(2 * options.rounds + 2):  # the first two warm up
            stream = number % 2 == 0
            process.signal(signal.SIGUSR1)
            send(stack.port, options.requests, stream=stream)
            process.signal(signal.SIGUSR2)
            path = Path(name, f"{number + 1}.profile")
            wait_for(path.exists)
            stats = pstats.Stats(str(path))
            if number > 1:
                found[stream].append(round(stats.total_calls / options.requests))  # type: ignore[attr-defined]  # typeshed lacks it
        for stream, calls in found.items():
            print(
                f"{'streamed' if stream else 'whole'}: {min(calls)} to {max(calls)} calls a request: {calls}"
            )
        if options.top:
            stats.sort_stats("ncalls").print_stats(options.top)


def send(port: int, num: int, *, stream: bool) -> None:
    """So many requests, one after the other on one connection."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 8,
        "stream": stream,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(num):
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        reply.read()
    connection.close()


def one(metrics: Metrics) -> None:
    """A request with a prefill and a decode worker."""
    record = metrics.begin("/v1/chat/completions", "0123456789abcdef", "")
    record.stage = "read"
    record.enter("render")
    record.model = "openai/gpt-oss-20b"
    leg = record.leg()
    leg.on(PREFILL)
    leg.answered(HANDOFF)
    leg.on(DECODE)
    leg.answered(FIRST)
    record.first_token_s = 0.01
    leg.end(LAST)
    record.generated()
    record.num_prompt_tokens, record.num_completion_tokens = 70, 8
    metrics.end(record)


def of_the_record(num: int = 200) -> None:
    """Print the microseconds of a request's record and metrics, once as many records are kept as fit."""
    metrics, found = Metrics(), []
    for _ in range(7000):
        one(metrics)
    for _ in range(200):
        began_s = time.perf_counter()
        for _ in range(num):
            one(metrics)
        found.append((time.perf_counter() - began_s) / num * 1e6)
    print(f"record and metrics: {min(found):.1f} us a request")


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top", type=int, default=0, help="also this many functions of the last round")
    options = parser.parse_args()
    of_the_record()
    counted(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--frontend"]:
        sys.exit(profiled(sys.argv[2], sys.argv[3:]))
    main()
