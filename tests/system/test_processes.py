"""A frontend in two processes behaves as one: connections, metrics, background runs, reasoning, drain."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from frontend.text.tokenizer import ModelTokenizer
from tests.certificates import Authority
from tests.stack import MODEL, ROOT, Process, Stack
from tests.waiting import PATIENCE_S, wait_for

TOOL: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
# Rendered from its content, this call would be other text.
CALL = (
    "<|channel|>analysis<|message|>Look at the clock.<|end|>"
    "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{ }<|call|>"
)
SCENE = {"when": "What time is it?", "answers": [CALL, "<|channel|>final<|message|>It is noon.<|return|>"]}
# Long enough to be followed and stopped in the middle.
ENDLESS: Any = {"model": MODEL, "input": "Hello there!", "max_output_tokens": 20_000, "background": True}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A prefill and a decode worker, which play a scene; the test starts the frontend."""
    folder = tmp_path_factory.mktemp("stack")
    (folder / "scenes.yaml").write_text(yaml.safe_dump([SCENE]))
    settings = folder / "mocker.yaml"
    settings.write_text(yaml.safe_dump({"decode_step_ms": 10, "script": str(folder / "scenes.yaml")}))
    with Stack(folder, {"BATON_RESPONSE_STORE": ":memory:", "TMPDIR": str(folder)}) as stack:
        stack.worker("prefill", yaml=settings), stack.worker("decode", yaml=settings)
        yield stack


@pytest.fixture
def frontend(stack: Stack) -> Process:
    """A frontend of two processes, both ready: the one of the test before, if it still runs."""
    frontends = [each for each in stack.processes if each.name == "frontend"]
    if frontends and frontends[-1].popen.poll() is None:
        return frontends[-1]
    for each in frontends[-1:]:
        each.log.unlink()  # the next one's begins empty
    process = stack.frontend("--num-processes", "2")
    stack.wait_ready(1, 1)
    wait_for(lambda: process.text().count("process_ready") == 2)
    wait_for(lambda: all(stack.health().get("status") == "healthy" for _ in range(8)))  # each finds workers
    return process


@pytest.fixture
def client(stack: Stack, frontend: Process) -> Iterator[httpx.Client]:
    """A client with a new connection for each request."""
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=stack.url, limits=limits, timeout=PATIENCE_S) as client:
        yield client


def children(process: Process) -> set[int]:
    """The process ids of a process's children."""
    listed = Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children").read_text()
    return set(map(int, listed.split()))


def test_a_background_response_is_followed_and_cancelled_from_each(client: httpx.Client) -> None:
    for _ in range(4):  # requests go to both processes
        begun = client.post("/v1/responses", json={**ENDLESS, "stream": False}).json()
        with client.stream("GET", f"/v1/responses/{begun['id']}?stream=true") as refused:
            refused.read()
            assert refused.json()["error"]["param"] == "stream"
        assert client.get(f"/v1/responses/{begun['id']}").json()["status"] == "in_progress"
        stopped = client.post(f"/v1/responses/{begun['id']}/cancel").json()
        assert stopped["status"] == "cancelled"
        assert client.post(f"/v1/responses/{begun['id']}/cancel").json() == stopped


def test_a_background_response_is_followed_and_deleted_at_another_frontend_of_the_store(
    stack: Stack, tmp_path: Path
) -> None:
    store = ("--response-store", str(tmp_path / "responses.sqlite3"))
    (runs_it, theirs), (other, ours) = stack.another_frontend(*store), stack.another_frontend(*store)
    begun = httpx.post(f"{theirs}/v1/responses", json=ENDLESS).json()
    path = f"/v1/responses/{begun['id']}"
    refused = httpx.get(f"{ours}{path}?stream=true")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    assert httpx.delete(f"{ours}{path}").json()["deleted"] is True

    with httpx.stream("POST", f"{theirs}/v1/responses", json=ENDLESS | {"stream": True}) as stream:
        seen = (json.loads(line[6:]) for line in stream.iter_lines() if line[:6] == "data: ")
        streamed = next(seen)["response"]["id"]
        assert next(event for event in seen if event["sequence_number"] == 3)
        runs_it.signal(signal.SIGTERM)  # it is followed while it drains, too
        wait_for(lambda: "draining" in runs_it.text())
        with httpx.stream("GET", f"{ours}/v1/responses/{streamed}?stream=true&starting_after=3") as followed:
            events = (line for line in followed.iter_lines() if line[:6] == "data: ")
            assert json.loads(next(events)[6:])["sequence_number"] == 4
            assert httpx.post(f"{ours}/v1/responses/{streamed}/cancel").json()["status"] == "cancelled"
            assert json.loads(list(events)[-1][6:])["response"]["status"] == "cancelled"
    assert runs_it.wait() == 0
    assert httpx.get(f"{ours}{path}").status_code == 404
    assert httpx.get(f"{ours}/v1/responses/{streamed}").json()["status"] == "cancelled"
    other.signal(signal.SIGTERM)
    assert other.wait() == 0
    stack.processes = [process for process in stack.processes if process not in (runs_it, other)]


def test_an_answer_keeps_its_tokens_and_reasoning_in_the_other_process(client: httpx.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "What time is it?"}]
    first = client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "tools": [TOOL]})
    (call,) = first.json()["choices"][0]["message"]["tool_calls"]
    messages.append({"role": "assistant", "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "12:00"})
    body = {"model": MODEL, "messages": messages, "tools": [TOOL]}
    result = "<|start|>functions.get_time to=assistant<|channel|>commentary<|message|>12:00<|end|>"
    result += "<|start|>assistant"
    written = ModelTokenizer.load(ROOT / "models/demo").encode_text(CALL + result, allow_special=True)
    num_tokens = first.json()["usage"]["prompt_tokens"] + len(written)
    for _ in range(4):  # both processes
        second = client.post("/v1/chat/completions", json=body).json()
        assert second["choices"][0]["message"]["content"] == "It is noon."
        assert second["usage"]["prompt_tokens"] == num_tokens


def test_a_process_that_dies_is_replaced(frontend: Process, client: httpx.Client) -> None:
    before = children(frontend)
    with streaming(client, 500) as opened:  # none has ended when the last one has begun
        lines = [stream.iter_lines() for stream in opened]
        assert all(any(line.startswith("data: ") for line in each) for each in lines)
        os.kill(min(before), signal.SIGKILL)
        assert set(map(is_complete, lines)) == {False, True}
    wait_for(lambda: frontend.text().count("process_ready") == 3)
    assert len(children(frontend) & before) == 1
    assert len(children(frontend)) == 2
    for _ in range(4):
        assert client.get("/health").status_code == 200


def test_a_drain_lets_streams_of_every_process_end(
    stack: Stack, frontend: Process, client: httpx.Client
) -> None:
    [folder] = stack.folder.glob("baton-frontend-*")
    assert folder.stat().st_mode & 0o077 == 0
    with streaming(client) as opened:
        frontend.signal(signal.SIGTERM)
        assert all(stream.read().endswith(b"data: [DONE]\n\n") for stream in opened)
    assert frontend.wait() == 0
    assert not folder.exists()


def test_processes_end_with_their_supervisor(stack: Stack, frontend: Process, client: httpx.Client) -> None:
    assert client.get("/live").status_code == 200
    left = children(frontend)
    frontend.kill()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    assert not list(stack.folder.glob("baton-frontend-*"))


def stream_of(num_tokens: int) -> Any:
    """A completion that can be interrupted."""
    return {"model": MODEL, "prompt": "one two three", "max_tokens": num_tokens, "stream": True}


@contextmanager
def streaming(client: httpx.Client, num_tokens: int = 150) -> Iterator[list[httpx.Response]]:
    """Eight streams, over both processes."""
    with ExitStack() as open_:
        yield [
            open_.enter_context(client.stream("POST", "/v1/completions", json=stream_of(num_tokens)))
            for _ in range(8)
        ]


def is_complete(lines: Iterator[str]) -> bool:
    """Whether a stream comes to its end."""
    try:
        return "data: [DONE]" in list(lines)
    except httpx.RemoteProtocolError:
        return False


@pytest.mark.parametrize(("scheme", "before", "after"), [("http", "2", "1"), ("https", "1", "2")])
def test_a_restart_that_takes_the_port_over_refuses_no_connection(
    stack: Stack, scheme: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "url", stack.url.replace("http", scheme))
    cert, key = Authority(stack.folder).sign("server")
    flags = [f"--tls-cert-file={cert}", f"--tls-key-file={key}"] if scheme == "https" else []
    running = stack.frontend("--num-processes", before, *flags)
    stack.wait_ready(1, 1)
    with httpx.stream(
        "POST", f"{stack.url}/v1/completions", json=stream_of(150), timeout=PATIENCE_S, verify=False
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        then = stack.next_frontend("--num-processes", after, *flags)
        while running.popen.poll() is None:
            assert stack.get("/live").status_code == 200
        assert "data: [DONE]" in list(lines)
    assert running.wait() == 0
    for _ in range(3):
        assert stack.post("/v1/completions", **stream_of(2)).status_code == 200
    then.signal(signal.SIGTERM)
    assert then.wait() == 0
    assert "Traceback" not in running.text() + then.text()
