"""Load on the mocker: every token in order, no KV pinned afterwards, memory flat."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.stack import MODEL, Stack
from tests.waiting import PATIENCE_S


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    yield stack
    stack.stop()


async def stream_of(client: httpx.AsyncClient, url: str, prompt: str, num_tokens: int) -> list[str]:
    """The texts of a streamed completion, one per event."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "stream": True}
    texts: list[str] = []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    return texts


def test_a_hundred_streams_at_once_get_every_token_in_order(stack: Stack) -> None:
    stack.frontend(), stack.worker("prefill"), stack.worker("decode")
    stack.wait_ready(1, 1)

    async def run() -> tuple[list[str], list[list[str]]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
            alone = await stream_of(client, stack.url, "the same prompt", 200)
            together = [stream_of(client, stack.url, "the same prompt", 200) for _ in range(100)]
            return alone, await asyncio.gather(*together)

    alone, together = asyncio.run(run())

    expected = "".join(alone)
    assert len(expected) > 200
    assert all("".join(texts) == expected for texts in together)
    stack.wait_idle()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_requests", [1000, pytest.param(4000, marks=pytest.mark.slow)])
def test_memory_stays_flat(stack: Stack, tmp_path: Path, num_requests: int) -> None:
    quick = tmp_path / "quick.yaml"
    quick.write_text("decode_step_ms: 1\nkv_transfer_ms: 0\n")
    stack.frontend(), stack.worker("prefill", yaml=quick), stack.worker("decode", yaml=quick)
    stack.wait_ready(1, 1)

    async def requests(num: int) -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            todo = iter(range(num))

            async def client_loop() -> None:
                for number in todo:
                    assert await stream_of(client, stack.url, f"request {number}", 4)

            await asyncio.gather(*(client_loop() for _ in range(16)))

    asyncio.run(requests(1000))
    before = [process.rss_bytes for process in stack.processes]
    asyncio.run(requests(num_requests))
    after = [process.rss_bytes for process in stack.processes]

    for process, first, last in zip(stack.processes, before, after, strict=True):
        assert last - first < 8 * 2**20, f"{process.name} grew from {first} to {last} bytes"
    stack.wait_idle()
