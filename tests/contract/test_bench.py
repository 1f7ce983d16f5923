"""`python -m baton bench` with a scripted frontend: what it counts, and answers that no frontend sends."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from operations.commands import main

GOOD = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"reasoning_content": "a"}}]},
    {"choices": [{"delta": {"content": "b"}}]},
    {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}},
]
STREAM = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in GOOD)
DONE = b"data: [DONE]\n\n"
OK = b"HTTP/1.0 200 OK\r\n\r\n"
NUM_FIRST = 3


@contextmanager
def frontend(head: bytes, body: bytes) -> Iterator[str]:
    """Its URL. The first requests get a whole answer, the others this one."""
    num_requests = iter(range(1000))

    class Frontend(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            is_first = next(num_requests) < NUM_FIRST
            answer = OK + STREAM + DONE if is_first else head + body
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Frontend) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("head", "body", "failure"),
    [
        (OK, STREAM + DONE, ""),
        (OK, STREAM, "its stream ended too early"),
        (OK, b'data: {"usage": {"prompt_tokens": 1e999, "completion_tokens": 1}}\n\n', "is no frontend"),
        (OK, b'data: {"choices": [{"delta": []}]}\n\n', "is no frontend"),
        (OK, b'data: {"choices": ' + b"[" * 100_000 + b"\n\n", "is no frontend"),
        (OK, b"data: {" + b" " * (2 << 20), "a line of its stream is too long"),
        (OK, b'data: {"error": {"message": "m", "code": "worker_lost"}}\n\n', "200 worker_lost"),
        (b"HTTP/1.0 429 Busy\r\n\r\n", b'{"error": {"message": "m", "code": "full"}}', "429 full"),
        (b"HTTP/1.0 500 Oops\r\n\r\n", b"<html>", "500"),
        (b"", b"", "if it serves HTTPS, give"),
    ],
    ids=["good", "cut", "infinite", "list", "deep", "long", "error", "busy", "page", "closed"],
)  # fmt: skip
def test_each_is_counted(head: bytes, body: bytes, failure: str, capsys: pytest.CaptureFixture[str]) -> None:
    with frontend(head, body) as url:
        code = main(["bench", "--url", url, "--model", "m", "--requests", "2", "--json"])
    printed = capsys.readouterr()
    assert "error" not in printed.err
    found = json.loads(printed.out)
    assert (code, found["answered"], found["failed"]) == ((1, 0, 2) if failure else (0, 2, 0))
    assert [count for text, count in found["failures"].items() if failure in text] == [2] * bool(failure)
    if not failure:
        assert (found["num_prompt_tokens"], found["num_tokens"]) == (9, 5)
        assert 0 < found["ttft_ms"]["max"] <= found["duration_ms"]["max"]
        assert found["longest_gap_ms"]["p50"] == pytest.approx(4 * found["itl_ms"]["p50"], abs=0.05)
