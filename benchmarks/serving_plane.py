"""CPU of frontend and workers per streamed token and per short request, with real processes.

`python benchmarks/serving_plane.py [--streams 64] [--tokens 256] [--step-ms 5] [--rounds 3]` starts a
frontend and mocker workers, streams chat completions over loopback, and prints the figures as JSON.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.stack import MODEL, Process, Stack

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(process: Process) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{process.popen.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def stream(port: int, num_tokens: int) -> tuple[int, int]:
    """(events, bytes) of one streamed chat completion, read as raw bytes."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me a story about a relay race."}],
            "max_tokens": num_tokens,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
    num_events = num_bytes = 0
    while data := await reader.read(1 << 16):
        num_events += data.count(b"data: {")
        num_bytes += len(data)
    writer.close()
    return num_events, num_bytes


async def load(port: int, num_streams: int, num_tokens: int, rounds: int) -> int:
    """Run `num_streams` streams at once, `rounds` times; returns the number of events."""
    total = 0
    for _ in range(rounds):
        for num_events, _ in await asyncio.gather(*(stream(port, num_tokens) for _ in range(num_streams))):
            total += num_events
    return total


def measure(stack: Stack, num_streams: int, num_tokens: int, rounds: int) -> dict[str, float]:
    """Microseconds of CPU per token, by process, after a warm-up round."""
    port = int(stack.url.rpartition(":")[2])
    asyncio.run(load(port, num_streams, num_tokens, 1))
    before = {process.name: cpu_s(process) for process in stack.processes}
    events = asyncio.run(load(port, num_streams, num_tokens, rounds))
    tokens = num_streams * num_tokens * rounds
    used = {p.name: (cpu_s(p) - before[p.name]) * 1e6 for p in stack.processes}
    figures = {f"{name}_us_per_token": round(us / tokens, 2) for name, us in used.items()}
    per_request = {f"{name}_us_per_request": round(us / (num_streams * rounds)) for name, us in used.items()}
    return {"tokens": tokens, "events": events, **figures, **per_request}


def main() -> None:
    """Measure long streams, then short requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder))
        mocker = Path(folder) / "mocker.yaml"
        mocker.write_text(f"decode_step_ms: {options.step_ms}\nkv_transfer_ms: 0\n")
        try:
            stack.frontend(), stack.worker("prefill", yaml=mocker, name="prefill")
            stack.worker("decode", yaml=mocker, name="decode")
            stack.wait_ready(1, 1)
            long = measure(stack, options.streams, options.tokens, options.rounds)
            short = measure(stack, 16, 8, 30)
        finally:
            stack.stop()
    json.dump({"options": vars(options), "long": long, "short": short}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
