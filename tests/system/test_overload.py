"""More requests than small pools hold: who is served, who is refused and when, in which order."""

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from tests.stack import MODEL, Stack
from tests.waiting import PATIENCE_S, scaled, until


@pytest.fixture(
    scope="module",
    params=[pytest.param(2, id="two-processes"), pytest.param(1, id="one-process", marks=pytest.mark.slow)],
)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two decode workers with two places each; a request takes one for about half a second."""
    folder = tmp_path_factory.mktemp("stack")
    small = folder / "small.yaml"
    small.write_text(yaml.safe_dump({"max_batch_size": 2, "max_queue_size": 2, "decode_step_ms": 25}))
    with Stack(folder) as stack:
        flags = ("--num-processes", str(request.param))
        stack.serve("prefill", "prefill", "decode", "decode", flags=flags, yaml=small)
        yield stack


def refused(stack: Stack) -> float:
    """How many requests were refused so far."""
    text = stack.get("/metrics").text
    return sum(map(float, re.findall(r"^baton_refused_requests_total{.*} (\S+)$", text, re.MULTILINE)))


class Seen(msgspec.Struct):
    """What a client got; times are from its request on."""

    status: int
    head_s: float
    ended_s: float
    retry_after_s: int
    text: str


async def ask(client: httpx.AsyncClient, url: str, key: str, num_tokens: int = 20) -> Seen:
    """One streamed request, once."""
    body: dict[str, Any] = {"model": MODEL, "prompt": "a b c", "max_tokens": num_tokens, "stream": True}
    began_s = time.monotonic()
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
        head_s = time.monotonic() - began_s
        text = (await response.aread()).decode()
    after = int(response.headers.get("retry-after", 0))
    return Seen(response.status_code, head_s, time.monotonic() - began_s, after, text)


async def patient(client: httpx.AsyncClient, url: str, key: str) -> list[Seen]:
    """All its tries until it was served."""
    tries = [await ask(client, url, key)]
    while tries[-1].status != 200:
        await asyncio.sleep(tries[-1].retry_after_s)
        tries.append(await ask(client, url, key))
    return tries


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None), verify=False)


def is_whole(seen: Seen) -> bool:
    return seen.text.endswith("data: [DONE]\n\n") and '"error"' not in seen.text


async def test_every_stream_is_whole_or_refused_with_a_status_and_the_time_to_come_back(stack: Stack) -> None:
    async with client() as http:
        await patient(http, stack.url, "many")
        tried = await asyncio.gather(*(patient(http, stack.url, "many") for _ in range(100)))
    refused = [seen for tries in tried for seen in tries[:-1]]
    assert all(is_whole(tries[-1]) for tries in tried), "none ends with an error event"
    assert {seen.status for seen in refused} == {429}
    assert all(1 <= seen.retry_after_s <= 50 for seen in refused)
    assert max(seen.retry_after_s for seen in refused) > 3, "100 requests take 12 s"
    assert sorted(map(len, tried))[50] <= 3, "Retry-After is about right"
    metrics = stack.get("/metrics").text
    assert f'baton_refused_requests_total{{reason="queue_full"}} {float(len(refused))}' in metrics
    stack.wait_idle()


async def test_a_refusal_does_not_wait(stack: Stack) -> None:
    async with client() as http:
        await patient(http, stack.url, "many")
        holding = [asyncio.create_task(ask(http, stack.url, "many", 2000)) for _ in range(100)]
        # Of each process, so both are full.
        await until(lambda: sum(task.done() for task in holding) > 60)
        refused = await asyncio.gather(*(ask(http, stack.url, "many") for _ in range(6)))
        assert {task.result().status for task in holding if task.done()} == {429}
        await ended(*holding)

    assert {seen.status for seen in refused} == {429}
    reasons = re.findall(r'baton_refused_requests_total{reason="(.*)"} [1-9]', stack.get("/metrics").text)
    assert reasons == ["queue_full"], "none has waited"


async def test_a_caller_with_two_requests_is_not_starved_by_one_with_hundreds(stack: Stack) -> None:
    async with client() as http:
        await patient(http, stack.url, "few")
        num_refused = refused(stack)
        flood = [asyncio.create_task(patient(http, stack.url, "many")) for _ in range(200)]
        while await asyncio.to_thread(refused, stack) == num_refused:  # the queue is full then
            pass
        served = await asyncio.gather(*(patient(http, stack.url, "few") for _ in range(2)))
        await ended(*flood)

    for (seen,) in served:
        assert is_whole(seen)
        assert seen.ended_s < scaled(12), "200 requests take 25 s"
    stack.wait_idle()


async def ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
