"""What one large body costs others: the largest gap of a stream beside it, and the frontend's memory.

    python benchmarks/bodies.py [BODY ...] [--model-path models/demo] [--write benchmarks/results/bodies.json]

A frontend, a prefill and a decode mocker, and one stream with a token every 5 ms. Each body is sent alone,
beside the stream; `none` is an empty one, which shows what the machine adds."""

import argparse
import asyncio
import base64
import json
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
import benchmarks  # noqa: F401  checks the packages
from tests.stack import MODEL, Process, Stack

MOST_BYTES = 15 << 20
WATCHED_S = 2.0
"""How long the stream is watched after an answer."""


class Figures(msgspec.Struct):
    """Of one body: peak and kept are beyond the frontend's memory before it."""

    body: str
    num_bytes: int
    status: int
    code: str | None
    seconds: float
    largest_gap_ms: float
    peak_mb: float
    kept_mb: float


def _chat(text: str, **more: object) -> tuple[str, bytes]:
    messages = [{"role": "user", "content": text}]
    return "/v1/chat/completions", _json({"model": MODEL, "messages": messages, "max_tokens": 1, **more})


def _json(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _items(num: int) -> tuple[str, bytes]:
    items = [{"role": "user", "content": "a"}] * num
    return "/v1/responses", _json({"model": MODEL, "input": items, "max_output_tokens": 1, "store": False})


def _messages(num: int) -> tuple[str, bytes]:
    messages = [{"role": "user", "content": "a"}] * num
    return "/v1/chat/completions", _json({"model": MODEL, "messages": messages, "max_tokens": 1})


def _raw(path: str, data: bytes) -> tuple[str, bytes]:
    return path, b'{"model":"%b",%b}' % (MODEL.encode(), data)


BODIES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "none": lambda: ("/v1/chat/completions", b"{}"),
    "400,000 items": lambda: _items(400_000),
    "20,000 items": lambda: _items(20_000),
    "2,000 items": lambda: _items(2000),
    "references": lambda: _raw(
        "/v1/responses", b'"input":[%b]' % b",".join([b'{"type":"item_reference","id":"a"}'] * 20_000)
    ),
    "400,000 messages": lambda: _messages(400_000),
    "20,000 messages": lambda: _messages(20_000),
    "1,000,000 unknown keys": lambda: _chat("a", **{f"k{i}": 1 for i in range(1_000_000)}),
    "60,000 unknown keys": lambda: _chat("a", **{f"k{i}": 1 for i in range(60_000)}),
    "empty arrays": lambda: _raw("/v1/chat/completions", b'"messages":[%b]' % b",".join([b"[]"] * 5_000_000)),
    "numbers": lambda: _raw("/v1/completions", b'"prompt":[%b]' % b",".join([b"1"] * 7_500_000)),
    "500,000 numbers": lambda: _raw("/v1/completions", b'"prompt":[%b]' % b",".join([b"9999"] * 500_000)),
    "tools": lambda: _chat(
        "a", tools=[{"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}}
                    for i in range(10_000)],
    ),
    "words": lambda: _chat("word " * (MOST_BYTES // 5)),
    "escapes": lambda: _chat('"\n' * (MOST_BYTES // 4)),
    "spaces": lambda: _chat(" " * MOST_BYTES),
    "dashes": lambda: _chat("-" * MOST_BYTES),
    "digits": lambda: _chat("7" * MOST_BYTES),
    "base64": lambda: _chat(base64.b64encode(random.Random(1).randbytes(MOST_BYTES * 3 // 4)).decode()),
    "no JSON": lambda: ("/v1/chat/completions", b"{" + b" " * MOST_BYTES),
    "unclosed": lambda: ("/v1/chat/completions", b'{"messages":["' + b"\\\\u" * (MOST_BYTES // 3)),
    "deep": lambda: _raw("/v1/chat/completions", b'"x":' + b"[" * MOST_BYTES),
}  # fmt: skip


async def measure(name: str, port: int, frontend: Process) -> Figures:
    """Send a body beside a stream."""
    path, data = BODIES[name]()
    before_mb = _memory_mb(frontend, "VmRSS")
    _forget_peak(frontend)
    arrivals: list[float] = []
    stream = asyncio.create_task(_stream(port, arrivals))
    await asyncio.sleep(0.5)
    assert arrivals, "the stream runs"
    began_s = time.monotonic()
    status, answer = await asyncio.to_thread(_post, port, path, data)
    seconds = time.monotonic() - began_s
    await asyncio.sleep(WATCHED_S)
    stream.cancel()
    times = [at_s for at_s in arrivals if at_s >= began_s - 0.1]
    gap_s = max(b - a for a, b in zip(times, [*times[1:], time.monotonic()], strict=True))
    error = json.loads(answer).get("error") or {}
    return Figures(
        body=name,
        num_bytes=len(data),
        status=status,
        code=error.get("code"),
        seconds=round(seconds, 2),
        largest_gap_ms=round(gap_s * 1000, 1),
        peak_mb=round(_memory_mb(frontend, "VmHWM") - before_mb),
        kept_mb=round(_memory_mb(frontend, "VmRSS") - before_mb),
    )


async def _stream(port: int, arrivals: list[float]) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request("/v1/completions", _json(body)))
    try:
        while await reader.readline():
            arrivals.append(time.monotonic())
    finally:
        writer.close()


def _post(port: int, path: str, data: bytes) -> tuple[int, bytes]:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(_request(path, data))
        head, _, body = b"".join(iter(lambda: sock.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def _request(path: str, data: bytes) -> bytes:
    fields = f"host: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(data)}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + data


def _forget_peak(process: Process) -> None:
    Path(f"/proc/{process.popen.pid}/clear_refs").write_text("5")


def _memory_mb(process: Process, field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{process.popen.pid}/status").read_text())
    assert found
    return int(found[1]) / 1000


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("body", nargs="*", default=list(BODIES))
    parser.add_argument("--model-path", default="models/demo")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        pace = Path(folder) / "pace.yaml"
        pace.write_text(yaml.safe_dump({"decode_step_ms": 5, "prefill_tokens_per_s": 1e6}))
        stack = Stack(Path(folder))
        try:
            frontend = stack.frontend()
            for mode in ("prefill", "decode"):
                stack.worker(mode, yaml=pace, model_path=options.model_path)
            stack.wait_ready(1, 1)
            for name in options.body:
                found.append(asyncio.run(measure(name, int(stack.url.rpartition(":")[2]), frontend)))
                print(" ".join(f"{k}={v}" for k, v in msgspec.structs.asdict(found[-1]).items()), flush=True)
        finally:
            stack.stop()
    if options.write:
        options.write.write_bytes(msgspec.json.format(msgspec.json.encode(found)))


if __name__ == "__main__":
    main()
