"""The logs of a running stack: what happens to the fleet and to requests, as JSON."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stack import Process, Stack
from tests.waiting import wait_for

YAML = "max_batch_size: 1\nmax_queue_size: 1\ndecode_step_ms: 20\n"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two decode workers with a place each."""
    folder: Path = tmp_path_factory.mktemp("logs")
    yaml = folder / "mocker.yaml"
    yaml.write_text(YAML)
    with Stack(folder, {"BATON_LOG_FORMAT": "json", "BATON_LIVENESS_S": "2"}) as stack:
        flags = ("--access-log", "all", "--log-level", "debug")
        stack.serve("prefill", "decode", "decode", flags=flags, yaml=yaml)
        yield stack


def lines(process: Process, message: str, **fields: object) -> list[dict[str, Any]]:
    whole, _, _ = process.text().rpartition("\n")  # the last one may be half written
    found = [json.loads(line) for line in whole.splitlines()]
    return [line for line in found if line["message"] == message and fields.items() <= line.items()]


def request(stack: Stack, request_id: str, **body: Any) -> int:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20} | body
    return stack.post("/v1/chat/completions", {"x-request-id": request_id}, **body).status_code


def test_a_worker_that_stands_still_is_lost_and_recovers(stack: Stack) -> None:
    frontend, _, decode, _ = stack.processes
    decode.signal(signal.SIGSTOP)
    statuses = [request(stack, "resumed") for _ in range(2)]  # one on each decode worker
    wait_for(lambda: lines(frontend, "worker lost", worker=decode.name))
    decode.signal(signal.SIGCONT)
    wait_for(lambda: lines(frontend, "worker recovered", worker=decode.name))
    (recovered,) = lines(frontend, "worker recovered", worker=decode.name)
    assert recovered["away_s"] > 0
    assert statuses == [200, 200]
    assert lines(frontend, "retrying", request_id="resumed", worker=decode.name, reason="worker_lost")
    wait_for(lambda: lines(frontend, "load"))
    assert {line["client"] for line in lines(frontend, "request")} == {"127.0.0.1"}
