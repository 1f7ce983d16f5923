"""`python -m baton why` in the situations that operators meet: the stage, the worker and the duration."""

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import yaml

from tests.stack import MODEL, Process, Stack
from tests.waiting import PATIENCE_S, wait_for

POOL = ThreadPoolExecutor(32)
Asked = Future[float]


def ask(stack: Stack, request_id: str, num_tokens: int = 20, key: str = "any", **body: Any) -> Asked:
    """A request on its way; how long it took."""

    def post() -> float:
        began_s = time.monotonic()
        headers = {"x-request-id": request_id, "x-api-key": key}
        stack.post("/v1/completions", headers, **{"prompt": request_id, "max_tokens": num_tokens} | body)
        return time.monotonic() - began_s

    return POOL.submit(post)


def running(stack: Stack, request_id: str, num_tokens: int = 200) -> Asked:
    """A long answer that has begun."""
    asked = ask(stack, request_id, num_tokens)
    wait_for(
        lambda: (
            found(stack, f"id={request_id}")
            and found(stack, f"id={request_id}")[0]["record"].get("first_token_s")
        )
    )
    return asked


def found(stack: Stack, query: str) -> list[dict[str, Any]]:
    """What GET /requests has for this query."""
    requests: list[dict[str, Any]] = stack.get(f"/requests?{query}").json()["requests"]
    return requests


def explained(stack: Stack, request_id: str) -> dict[str, Any]:
    """The only request with this id, once it has ended."""
    wait_for(
        lambda: (
            [each["record"].get("status", 200) != 0 for each in found(stack, f"id={request_id}")] == [True]
        )
    )
    return found(stack, f"id={request_id}")[0]


def guilty(stack: Stack, request_id: str, stage: str, worker: str, lasted_s: float | None = None) -> Any:
    """The verdict, whose stage and worker are these; it was out of line for so long, within a fifth."""
    explanation = explained(stack, request_id)
    verdict = explanation["verdict"]
    assert verdict is not None, explanation
    assert (verdict["stage"], verdict.get("worker", "")) == (stage, worker), explanation
    if lasted_s is not None:
        assert verdict["excess_s"] == pytest.approx(lasted_s, rel=0.2, abs=0.05), explanation
    return verdict


def is_calm(stack: Stack, request_id: str) -> bool:
    return explained(stack, request_id)["verdict"] is None


class Paused:
    """A fault that ends after `at_least_s`: the processes stand still, or the client; how long it lasted."""

    def __init__(self, at_least_s: float, *processes: Process) -> None:
        self._processes = processes
        self._at_least_s = at_least_s
        self.s = 0.0

    def __enter__(self) -> "Paused":
        self._began_s = time.monotonic()
        for each in self._processes:
            each.signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(self._at_least_s)  # the fault itself
        for each in self._processes:
            each.signal(signal.SIGCONT)
        self.s = time.monotonic() - self._began_s


def named(stack: Stack, role: str, number: int, *flags: str, **settings: float) -> Process:
    """A worker of that name, and these settings of the mocker's."""
    name = f"{role}-{number}"
    path = stack.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return stack.worker(role, "--name", name, *flags, name=name, yaml=path)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker that nobody gives up soon, and what is usual there."""
    with Stack(tmp_path_factory.mktemp("calm")) as stack:
        stack.frontend("--num-processes", "1")
        for role in ("prefill", "decode"):
            named(stack, role, 0, prefill_tokens_per_s=1e8, max_cached_tokens=0)
        stack.wait_ready(1, 1)
        for asked in [ask(stack, f"healthy-{i}") for i in range(32)]:
            asked.result()
        yield stack


def process(stack: Stack, name: str) -> Process:
    return next(each for each in stack.processes if each.name == name)


def test_a_prefill_worker_that_stands_still_for_a_moment(calm: Stack) -> None:
    with Paused(0.8, process(calm, "prefill-0")) as lasted:
        asked = ask(calm, "prefill-still")
    asked.result()
    guilty(calm, "prefill-still", "transit", "prefill-0", lasted.s)


def test_a_decode_worker_that_stands_still_before_the_first_token(calm: Stack) -> None:
    with Paused(0.8, process(calm, "decode-0")) as lasted:
        asked = ask(calm, "decode-still-first")
    asked.result()
    guilty(calm, "decode-still-first", "transit", "decode-0", lasted.s)


def test_a_decode_worker_that_stands_still_in_mid_stream(calm: Stack) -> None:
    asked = running(calm, "decode-still")
    with Paused(0.8, process(calm, "decode-0")) as lasted:
        pass
    asked.result()
    guilty(calm, "decode-still", "stream", "decode-0", lasted.s)


def test_a_frontend_that_stands_still_blames_no_worker(calm: Stack) -> None:
    asked = running(calm, "frontend-still")
    with Paused(0.8, process(calm, "frontend")) as lasted:
        pass
    asked.result()
    assert guilty(calm, "frontend-still", "stream", "", lasted.s)["cause"] == "this frontend stood still"


def sent_but_its_end(stack: Stack, request_id: str) -> tuple[socket.socket, bytes]:
    """A connection that has sent a request but for its last byte."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {request_id}\r\n"
    connection = socket.create_connection(("127.0.0.1", stack.port), PATIENCE_S)
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:-1])
    return connection, body[-1:]


def test_a_client_that_sends_its_body_slowly(calm: Stack) -> None:
    with Paused(0.8) as lasted:
        connection, rest = sent_but_its_end(calm, "slow-body")
    with connection:
        connection.sendall(rest)
        guilty(calm, "slow-body", "read", "", lasted.s)


def test_a_long_prompt(calm: Stack) -> None:
    ask(calm, "long-prompt", prompt=["many words " * 30_000] * 12).result()
    lasted_s = explained(calm, "long-prompt")["record"]["stages"]["render"]
    guilty(calm, "long-prompt", "render", "", lasted_s)


def test_a_client_that_leaves(calm: Stack) -> None:
    with Paused(0.8, process(calm, "prefill-0")):
        connection, rest = sent_but_its_end(calm, "left")
        connection.sendall(rest)
        time.sleep(0.6)  # the patience of this client
        connection.close()
    lasted_s = explained(calm, "left")["record"]["duration_s"]  # until the frontend noticed
    assert guilty(calm, "left", "prefill", "prefill-0", lasted_s)["cause"] == "prefill-0 did not answer"


@pytest.mark.parametrize("num", [200, pytest.param(1000, marks=pytest.mark.slow)])
async def test_of_many_healthy_requests_none_is_accused(calm: Stack, num: int) -> None:
    limits = httpx.Limits(max_connections=50)
    async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_S, verify=False) as http:

        async def one(i: int) -> None:
            body = {"model": MODEL, "prompt": "a b c " * (1 + i % 50), "max_tokens": 20, "stream": i % 2 == 0}
            assert (await http.post(f"{calm.url}/v1/completions", json=body)).is_success

        began_s = time.time()
        await asyncio.gather(*(one(i) for i in range(num)))
    slowest = [each for each in found(calm, "slowest=100") if each["record"]["at_s"] >= began_s]
    assert len(slowest) > 20
    assert [each for each in slowest if each["verdict"] is not None] == []
