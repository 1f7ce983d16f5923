"""`python -m baton why` in the situations that operators meet: the stage, the worker and the duration."""

import asyncio
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import yaml

from frontend.http.keys import line_of
from operations.commands import main
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
    wait_for(lambda: any("first_token_s" in each["record"] for each in found(stack, f"id={request_id}")))
    return asked


def get(stack: Stack, path: str, key: str = "root") -> httpx.Response:
    """A page, for the owner of this key; `root` is an admin."""
    return httpx.get(f"{stack.url}{path}", headers={"x-api-key": key}, timeout=PATIENCE_S, verify=False)


def found(stack: Stack, query: str) -> list[dict[str, Any]]:
    """What GET /requests has for this query."""
    requests: list[dict[str, Any]] = get(stack, f"/requests?{query}").json()["requests"]
    return requests


def explained(stack: Stack, request_id: str) -> dict[str, Any]:
    """The only request with this id, once it has ended."""
    query = f"id={request_id}"
    wait_for(lambda: [each["record"].get("status") != 0 for each in found(stack, query)] == [True])
    return found(stack, query)[0]


def slow_stage(stack: Stack, request_id: str, stage: str, worker: str, lasted_s: float | None = None) -> Any:
    """The verdict, whose stage and worker are these, or none if other work held the worker up; it was out of
    line for so long, within a fifth, or longer, on a busy machine."""
    explanation = explained(stack, request_id)
    verdict = explanation["verdict"]
    assert verdict is not None, explanation
    worker = "" if HELD_UP.fullmatch(verdict["cause"]) else worker
    assert (verdict["stage"], verdict.get("worker", "")) == (stage, worker), explanation
    if lasted_s is not None:
        assert verdict["excess_s"] >= 0.8 * lasted_s - 0.05, explanation
    return verdict


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
        for i in range(0, 32, 4):  # a crowd would be slow on a busy machine
            for asked in [ask(stack, f"healthy-{i}-{j}") for j in range(4)]:
                asked.result()
        yield stack


def process(stack: Stack, name: str) -> Process:
    return next(each for each in stack.processes if each.name == name)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_that_stands_still_before_the_first_token(calm: Stack, name: str) -> None:
    with Paused(0.8, process(calm, name)) as lasted:
        asked = ask(calm, f"{name}-still-first")
    asked.result()
    slow_stage(calm, f"{name}-still-first", "transit", name, lasted.s)


def test_a_decode_worker_that_stands_still_in_mid_stream(calm: Stack) -> None:
    asked = running(calm, "decode-still")
    with Paused(0.8, process(calm, "decode-0")) as lasted:
        pass
    asked.result()
    slow_stage(calm, "decode-still", "stream", "decode-0", lasted.s)


def test_a_frontend_that_stands_still_is_the_cause_and_no_worker(calm: Stack) -> None:
    asked = running(calm, "frontend-still")
    with Paused(0.8, process(calm, "frontend")) as lasted:
        pass
    asked.result()
    assert slow_stage(calm, "frontend-still", "stream", "", lasted.s)["cause"] == "this frontend stood still"


def sent_but_its_end(stack: Stack, request_id: str, **fields: Any) -> tuple[socket.socket, bytes]:
    """A connection that has sent a request but for its last byte."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 5} | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {request_id}\r\n"
    connection = socket.create_connection(("127.0.0.1", stack.port), PATIENCE_S)
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:-1])
    return connection, body[-1:]


def test_a_client_that_sends_its_body_slowly(calm: Stack) -> None:
    with Paused(0.8) as lasted:
        connection, rest = sent_but_its_end(calm, "slow-body")
    with connection:
        connection.sendall(rest)
        slow_stage(calm, "slow-body", "read", "", lasted.s)


@pytest.mark.slow  # the kernel takes 2.6 MB before the client's pace shows
def test_a_client_that_reads_slowly(calm: Stack) -> None:
    connection, rest = sent_but_its_end(calm, "slow-reader", max_tokens=5000, n=16, stream=True)
    with connection:
        with Paused(16.0) as lasted:
            connection.sendall(rest)
        running = found(calm, "id=slow-reader")[0]
        assert (running["record"]["now"], running["verdict"]["stage"]) == ("stream", "send")
    record = explained(calm, "slow-reader")["record"]
    verdict = slow_stage(calm, "slow-reader", "send", "")
    assert 1 < verdict["excess_s"] < lasted.s < record["duration_s"] + 1


def test_a_long_prompt(calm: Stack) -> None:
    ask(calm, "long-prompt", prompt=["many words " * 30_000] * 16).result()
    lasted_s = explained(calm, "long-prompt")["record"]["stages"]["render"]
    slow_stage(calm, "long-prompt", "render", "", lasted_s)


def test_a_client_that_leaves(calm: Stack, capsys: Any) -> None:
    with Paused(0.8, process(calm, "prefill-0")):
        connection, rest = sent_but_its_end(calm, "left")
        connection.sendall(rest)
        time.sleep(0.6)  # the patience of this client
        connection.close()
    lasted_s = explained(calm, "left")["record"]["duration_s"]  # until the frontend noticed
    assert slow_stage(calm, "left", "prefill", "prefill-0", lasted_s)["cause"] == "prefill-0 did not answer"
    assert main(["why", "left", "--url", calm.url]) == 0
    assert capsys.readouterr().out.startswith("left  499 the client left  ")


HELD_UP = re.compile(r"this frontend stood still|the host of \S+( frontend)? was busy")
"""By other work."""


@pytest.mark.parametrize("num", [200, pytest.param(1000, marks=pytest.mark.slow)])
async def test_of_many_healthy_requests_none_is_out_of_line(calm: Stack, num: int) -> None:
    limits = httpx.Limits(max_connections=50)
    async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_S, verify=False) as http:

        async def one(i: int) -> None:
            body = {"model": MODEL, "prompt": "a b c " * (1 + i % 50), "max_tokens": 20, "stream": i % 2 == 0}
            headers = {"x-request-id": f"many-{i}"}
            assert (await http.post(f"{calm.url}/v1/completions", json=body, headers=headers)).is_success

        await asyncio.gather(*(one(i) for i in range(num)))
    slowest = [each for each in found(calm, "slowest=100") if each["record"]["request_id"].startswith("many")]
    assert slowest
    causes = {each["verdict"]["cause"] for each in slowest if each["verdict"] is not None}
    assert [cause for cause in causes if not HELD_UP.fullmatch(cause)] == []


@pytest.fixture(scope="module")
def worn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two frontend processes, two workers of each role: prefill-1 is slow, KV moves slowly to decode-1."""
    with Stack(tmp_path_factory.mktemp("worn"), {"BATON_LIVENESS_S": "2"}) as stack:
        stack.frontend("--num-processes", "2")
        named(stack, "prefill", 0)
        named(stack, "prefill", 1, prefill_tokens_per_s=1500)
        named(stack, "decode", 0)
        named(stack, "decode", 1, kv_transfer_ms=700)
        stack.wait_ready(2, 2)
        for asked in [ask(stack, f"usual-{i}") for i in range(64)]:
            asked.result()
        yield stack


def landing(stack: Stack, name: str, worker: str, num_tokens: int = 20, **body: Any) -> str:
    """The id of the first of these requests that this worker took part in; they take turns on the workers."""
    for i in range(20):
        ask(stack, f"{name}-{i}", num_tokens, **body).result()
        (leg,) = explained(stack, f"{name}-{i}")["record"]["legs"]
        if worker in {leg["attempts"][0].get("prefill"), leg["attempts"][0].get("decode")}:
            return f"{name}-{i}"
    pytest.fail(f"{worker} got none of them")


def test_a_slow_link_of_one_pair(worn: Stack) -> None:
    verdict = slow_stage(worn, landing(worn, "link", "decode-1"), "kv_move", "decode-1", 0.7)
    assert verdict["cause"].startswith("KV moved slowly from prefill-")


def test_a_prefill_worker_that_is_slower_than_the_other(worn: Stack) -> None:
    request_id = landing(worn, "slow", "prefill-1", prompt=[100 + i * 7919 % 1000 for i in range(3000)])
    slow_stage(worn, request_id, "prefill", "prefill-1", 3000 / 1500)


def test_a_prefill_worker_that_stands_still_until_it_is_lost(worn: Stack, capsys: Any) -> None:
    with Paused(0.0, process(worn, "prefill-0")):
        asked = [ask(worn, f"frozen-{i}", 5) for i in range(4)]
        took_s = max(each.result() for each in asked)
    request_id = next(each["record"]["request_id"] for each in found(worn, "failed=10"))
    attempt_s = explained(worn, request_id)["record"]["legs"][0]["attempts"][0]["stages"]["prefill"]
    assert 1 < attempt_s < took_s
    verdict = slow_stage(worn, request_id, "prefill", "prefill-0", attempt_s)
    assert verdict["cause"] == "prefill-0 was lost"
    wait_for(lambda: len(worn.health()["instances"]) == 4)


def test_a_drained_worker_is_no_cause(worn: Stack) -> None:
    drained = named(worn, "decode", 2)
    worn.wait_ready(2, 3)
    asked = [running(worn, f"drained-{i}") for i in range(3)]
    drained.signal(signal.SIGTERM)
    for each in asked:
        each.result()
    assert drained.wait() == 0
    verdicts = [explained(worn, f"drained-{i}")["verdict"] for i in range(3)]
    assert [each for each in verdicts if each and each["worker"] == "decode-2"] == []


def test_a_decode_worker_that_is_killed_in_mid_stream(worn: Stack, capsys: Any) -> None:
    asked = [running(worn, f"killed-{i}") for i in range(4)]
    # Its streams go on on decode-1, to which KV moves slowly.
    killed = process(worn, "decode-0")
    killed.kill()
    for each in asked:
        each.result()
    records = [each["record"] for each in found(worn, "failed=20")]
    record = next(each for each in records if each["request_id"].startswith("killed"))
    (leg,) = record["legs"]
    assert leg["gap_s"] > 0.7
    verdict = slow_stage(worn, record["request_id"], "stream", "decode-0", leg["gap_s"])
    assert verdict["cause"] == "decode-0 was lost"
    assert main(["why", record["request_id"], "--url", worn.url]) == 0
    printed = capsys.readouterr().out
    at = leg["attempts"][0]["decode_at"]
    assert at.endswith(f"pid {killed.popen.pid}")
    for text in (f"decode-0 ({at})", "<-- worker_lost in stream after", "what would have helped: "):
        assert text in printed
    assert "slow stage: stream on decode-0, " in printed
    assert main(["why", "--failed", "--json", "--url", worn.url]) == 0
    assert main(["why", "no\x1b[2Jne", "--url", worn.url]) == 1
    assert "\x1b" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker of each role with two places, and API keys; everything is in the logs."""
    folder = tmp_path_factory.mktemp("small")
    keys = folder / "keys"
    keys.write_text("\n".join(line_of(key, key, is_admin=key == "root") for key in ("hog", "any", "root")))
    keys.chmod(0o600)
    with Stack(folder, {"BATON_API_KEYS_FILE": str(keys), "BATON_LOG_FORMAT": "json"}) as stack:
        stack.frontend("--access-log", "all", "--log-level", "debug")
        named(stack, "prefill", 0, "--log-level", "debug", max_batch_size=2, max_queue_size=40)
        named(stack, "decode", 0, "--log-level", "debug", max_batch_size=2, max_queue_size=40)
        stack.wait_ready(1, 1)
        yield stack


def test_a_key_that_fills_the_pool_and_another_that_waits(small: Stack, capsys: Any) -> None:
    usual_s = ask(small, "alone", 50).result()
    hogs = [ask(small, f"hog-{i}", 50, "hog") for i in range(12)]
    seen: set[str] = set()

    def are_everywhere() -> bool:
        seen.update(each["record"]["now"] for each in found(small, "running=1") if "now" in each["record"])
        return seen >= {"queue", "decode_wait", "stream"}

    wait_for(are_everywhere)
    took_s = ask(small, "victim", 50).result()
    verdict = explained(small, "victim")["verdict"]
    assert (verdict["stage"] in {"queue", "decode_wait"}, verdict["crowd"]) == (True, "hog")
    assert verdict["excess_s"] == pytest.approx(took_s - usual_s, rel=0.2, abs=0.1)
    last_s, request_id = max((each.result(), f"hog-{i}") for i, each in enumerate(hogs))
    assert main(["why", "victim", "--log", str(small.processes[0].log)]) == 0
    assert "with requests of hog" in capsys.readouterr().out
    verdict = explained(small, request_id)["verdict"]
    assert (verdict["stage"] in {"queue", "decode_wait"}, verdict["crowd"]) == (True, "")
    assert verdict["excess_s"] == pytest.approx(last_s - usual_s, rel=0.2, abs=0.1)


def test_prompts_that_wait_for_a_prefill_worker(small: Stack, capsys: Any) -> None:
    long = [[(i * 7919 + j) % 1000 + 100 for j in range(60_000)] for i in range(2)]
    asked = [ask(small, f"prompt-{i}", 5, prompt=prompt) for i, prompt in enumerate(long)]
    for each in asked:
        each.result()
    both = [explained(small, f"prompt-{i}") for i in range(2)]
    second, first = sorted(both, key=lambda each: (each["verdict"] or {}).get("stage") != "prefill_wait")
    verdict = second["verdict"]
    assert verdict["worker"] == "prefill-0" or HELD_UP.fullmatch(verdict["cause"])
    free_s = sent_s(first) + first["record"]["legs"][0]["attempts"][0]["stages"]["prefill"]
    assert verdict["excess_s"] == pytest.approx(free_s - sent_s(second), rel=0.2, abs=0.1)
    request_id, log = second["record"]["request_id"], small.folder / "frontend.log"
    wait_for(lambda: f'"request_id": "{request_id}"' in log.read_text())
    assert main(["why", request_id, "--log", str(log)]) == 0
    assert "slow stage: prefill_wait" in capsys.readouterr().out
    assert main(["why", "--slowest", "1", "--json", "--log", str(log)]) == 0
    assert len(json.loads(capsys.readouterr().out)["requests"]) == 1


def test_a_healthy_request_in_a_log(small: Stack, capsys: Any) -> None:
    ask(small, "logged", 5).result()
    log = small.folder / "frontend.log"
    wait_for(lambda: '"request_id": "logged"' in log.read_text())
    assert main(["why", "logged", "--log", str(log)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("logged  200  ")
    assert re.search(f"no stage is out of line|{HELD_UP.pattern}", printed)


def sent_s(explanation: dict[str, Any]) -> float:
    """When its first attempt was sent to a worker, as Unix time."""
    record = explanation["record"]
    queued_s = record["legs"][0]["attempts"][0]["stages"]["queue"]
    return float(record["at_s"] + record["stages"]["read"] + record["stages"]["render"] + queued_s)


def test_who_may_see_requests(small: Stack, capsys: Any) -> None:
    missing = httpx.get(f"{small.url}/requests?slowest=3", verify=False)
    assert (missing.status_code, missing.json()["error"]["code"]) == (401, "invalid_api_key")
    refused = get(small, "/requests?slowest=3", "hog")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_needed")
    assert get(small, "/requests?slowest=3").status_code == 200
    assert main(["why", "--slowest", "3", "--url", small.url, "--api-key", "hog"]) == 1
    assert capsys.readouterr().err.startswith("error: /requests needs an admin's API key: ")


CANARY = "zq7canaryzq7"


def test_no_text_of_a_client_is_in_records_logs_or_pages(small: Stack, capsys: Any) -> None:
    function = {"name": "f", "description": CANARY, "parameters": {"type": "object"}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": CANARY})}}
    messages = [
        {"role": "system", "content": f"<script>{CANARY}</script>"},
        {"role": "user", "content": CANARY},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": CANARY},
    ]
    headers = {"x-api-key": "any", "x-request-id": "bird"}
    tools = [{"type": "function", "function": function}]
    body: dict[str, Any] = {"messages": messages, "tools": tools, "max_tokens": 5}
    wrong = [{"role": CANARY, "content": ""}]
    for changes in ({}, {"model": "none"}, {"messages": wrong}, {"messages": CANARY}):
        small.post("/v1/chat/completions", headers, **body | changes)
    small.post("/v1/completions", headers, prompt=CANARY, max_tokens=5, user=CANARY, stop=[CANARY])
    assert len(found(small, "id=bird")) == 5
    pages = [get(small, path).text for path in ("/requests?id=bird", "/metrics", "/", "/fleet", "/health")]
    assert main(["why", "bird", "--url", small.url, "--api-key", "root"]) == 0
    logs = [path.read_text() for path in small.folder.glob("*.log")]
    wait_for(lambda: (small.folder / "frontend.log").read_text().count('"request_id": "bird"') >= 5)
    seen = [*pages, *logs, capsys.readouterr().out]
    assert [text for text in seen if CANARY in text] == []
