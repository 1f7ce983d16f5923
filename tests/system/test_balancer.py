"""Two frontends behind a plain TCP load balancer, sharing the file of stored responses; one is killed."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.stack import MODEL, Process, Stack
from tests.tcp_balancer import TcpBalancer, balanced
from tests.waiting import PATIENCE_S

NUM_TURNS = 4
NUM_TOKENS = 120


@pytest.fixture
def other(stack: Stack) -> Iterator[tuple[Process, str]]:
    """A second frontend of the shared stack, with the same file of responses."""
    process, url = stack.another_frontend()
    yield process, url
    process.kill()


@pytest.fixture
def balancer(stack: Stack, other: tuple[Process, str]) -> Iterator[tuple[str, TcpBalancer]]:
    """Its URL; each request that opens a connection goes to the next frontend."""
    with balanced(stack.port, int(other[1].rpartition(":")[2])) as found:
        yield found


def create(url: str, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "temperature": 0, "max_output_tokens": 20, **fields}
    return httpx.post(f"{url}/v1/responses", json=body, timeout=PATIENCE_S)


def test_a_conversation_goes_on_at_either_frontend_and_at_one_that_starts_later(
    stack: Stack, balancer: tuple[str, TcpBalancer]
) -> None:
    url, counted = balancer
    last_id = None
    for turn in range(NUM_TURNS):
        answer = create(url, input=f"This is turn {turn}.", previous_response_id=last_id)
        assert answer.status_code == 200, answer.text
        last_id = answer.json()["id"]

    items = httpx.get(f"{url}/v1/responses/{last_id}/input_items", params={"order": "asc"}).json()["data"]
    inputs = [item["content"][0]["text"] for item in items if item.get("role") == "user"]
    assert inputs == [f"This is turn {turn}." for turn in range(NUM_TURNS)]
    assert min(counted.num_connections.values()) >= NUM_TURNS // 2
    later, later_url = stack.another_frontend()
    last = create(later_url, input="This is the last turn.", previous_response_id=last_id)
    assert last.status_code == 200, last.text
    later.kill()


def read(url: str, key: str, after: str = "", num_events: int | None = None) -> tuple[list[Any], str]:
    """The data of the stream's next events, and the last one's id; sampled, without a seed."""
    body = {"model": MODEL, "prompt": "one two", "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
    headers = {"idempotency-key": key} | ({"last-event-id": after} if after else {})
    datas, last_id = [], after
    with (
        httpx.Client(timeout=PATIENCE_S, verify=False) as client,
        client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                datas.append(json.loads(line.removeprefix("data: ")))
            elif line.startswith("id: "):
                last_id = line.removeprefix("id: ")
                if len(datas) == num_events:
                    break
    return datas, last_id


def text_of(datas: list[Any]) -> str:
    return "".join(choice["text"] for data in datas for choice in data["choices"])


def test_a_stream_goes_on_through_the_balancer_when_its_frontend_is_killed(
    stack: Stack, other: tuple[Process, str], balancer: tuple[str, TcpBalancer]
) -> None:
    process, other_url = other
    whole, _ = read(stack.url, "this key")
    begun, last_id = read(other_url, "this key", num_events=len(whole) // 3)
    process.kill()

    rest, _ = read(balancer[0], "this key", last_id)

    assert len(begun) == len(whole) // 3
    assert [data["id"] for data in begun + rest] == [data["id"] for data in whole]
    assert text_of(begun + rest) == text_of(whole)
    assert text_of(read(stack.url, "another key")[0]) != text_of(whole)
    assert httpx.get(f"{balancer[0]}/health").status_code == 200  # past the one that refuses
