"""The response store's file cannot be written: answers go on, are found all the same, and say so."""

import resource
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack import Stack
from tests.stored_responses import rows
from tests.waiting import FAILOVER_S, wait_for


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve("agg")
        yield stack


def file_of(stack: Stack) -> Path:
    return Path(stack.environ["BATON_RESPONSE_STORE"])


@contextmanager
def locked(stack: Stack) -> Iterator[None]:
    """Another process writes, and does not end."""
    with closing(sqlite3.connect(file_of(stack), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@contextmanager
def full(stack: Stack) -> Iterator[None]:
    """No file of the frontend may grow; its log is shorter."""
    pid = stack.processes[0].popen.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    num_bytes = file_of(stack).with_name(f"{file_of(stack).name}-wal").stat().st_size
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def respond(stack: Stack, **fields: Any) -> httpx.Response:
    answer = stack.post("/v1/responses", input="Hello there!", max_output_tokens=20, **fields)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("harm", [locked, full])
def test_answers_go_on_while_the_store_cannot_be_written(
    stack: Stack, harm: Callable[[Stack], AbstractContextManager[None]]
) -> None:
    respond(stack)  # the file exists
    with harm(stack):
        began_s = time.monotonic()
        first = respond(stack).json()
        second = respond(stack, previous_response_id=first["id"])
        streamed = respond(stack, stream=True)
        background = respond(stack, background=True).json()
        took_s = time.monotonic() - began_s

        assert took_s < FAILOVER_S
        assert second.headers["x-baton-ignored"] == "store"
        assert "store" in streamed.headers["x-baton-ignored"]
        assert "response.incomplete" in streamed.text
        path = f"/v1/responses/{background['id']}"
        wait_for(lambda: stack.get(path).json()["status"] == "incomplete")
        assert stack.get(f"/v1/responses/{first['id']}").json() == first
        assert "response_store=failing" in stack.processes[0].text()

    ids = {first["id"], second.json()["id"], background["id"]}
    wait_for(lambda: ids <= {row[0] for row in rows(file_of(stack), "SELECT id FROM responses")})
    wait_for(lambda: "x-baton-ignored" not in respond(stack).headers)
