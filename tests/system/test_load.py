"""Load on the mocker: every token in order, no KV pinned afterwards, memory flat."""

import asyncio
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.stack import MODEL, Process, Stack, running_stack
from tests.waiting import PATIENCE_S


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path) as stack:
        yield stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker, ready."""
    with running_stack(tmp_path_factory.mktemp("stack"), "mocker") as stack:
        yield stack


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


async def test_a_hundred_streams_at_once_get_every_token_in_order(stack: Stack) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
        expected = "".join(await stream_of(client, stack.url, "the same prompt", 200))
        together = [stream_of(client, stack.url, "the same prompt", 200) for _ in range(100)]
        answers = ["".join(texts) for texts in await asyncio.gather(*together)]

    assert len(expected) > 200
    assert set(answers) == {expected}
    stack.wait_idle()


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_memory_stays_flat(own_stack: Stack, tmp_path: Path) -> None:
    quick = tmp_path / "quick.yaml"
    quick.write_text("decode_step_ms: 1\nkv_transfer_ms: 0\n")
    own_stack.serve("prefill", "decode", yaml=quick)

    async def requests(num: int) -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            todo = iter(range(num))

            async def client_loop() -> None:
                for number in todo:
                    assert await stream_of(client, own_stack.url, f"request {number}", 4)

            await asyncio.gather(*(client_loop() for _ in range(16)))

    await requests(1000)
    before = [process.rss_bytes for process in own_stack.processes]
    await requests(4000)
    after = [process.rss_bytes for process in own_stack.processes]

    for process, first, last in zip(own_stack.processes, before, after, strict=True):
        assert last - first < 8 * 2**20, f"{process.name} grew from {first} to {last} bytes"
    own_stack.wait_idle()


# A hundred times the context of the demo's workers.
TOO_LONG = "far too long a text " * 250_000
MOST_GROWTH_BYTES = 150_000_000


def test_a_prompt_far_beyond_the_context_costs_no_more_memory_than_its_body(stack: Stack) -> None:
    frontend = stack.processes[0]
    before = frontend.rss_bytes
    for _ in range(3):
        refused = stack.post("/v1/chat/completions", messages=[{"role": "user", "content": TOO_LONG}])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert frontend.rss_bytes - before < MOST_GROWTH_BYTES


# As many as there may be, but a machine may allow fewer open files.
MOST_STREAMS = 10_000
MOST_STREAM_BYTES = 60_000


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_ten_thousand_streams_are_open_at_once(own_stack: Stack, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_streams = min(MOST_STREAMS, hard - 3000)
    slow = tmp_path / "slow.yaml"
    sizes = {"max_batch_size": num_streams + 1, "max_queue_size": num_streams + 1}
    slow.write_text(yaml.safe_dump({"decode_step_ms": 5000, "prefill_tokens_per_s": 1e7, **sizes}))
    own_stack.serve("prefill", "decode", yaml=slow)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        await open_many(num_streams, own_stack.processes[0], own_stack.port)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def open_many(num_streams: int, frontend: Process, port: int) -> None:
    """Open the streams, without a client library: those take longer the more connections there are."""
    body = json.dumps(
        {"model": MODEL, "prompt": "word " * 100, "max_tokens": 20_000, "stream": True}
    ).encode()
    fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    head = f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode()

    async def opened() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        return reader, writer

    async with asyncio.timeout(5 * PATIENCE_S):
        streams = [await opened()]
        before = frontend.rss_bytes
        while len(streams) < num_streams:
            streams += await asyncio.gather(*[opened() for _ in range(100)])
        for reader, _ in streams:
            await reader.readuntil(b'data: {"id"')  # a token
    assert frontend.rss_bytes - before < num_streams * MOST_STREAM_BYTES
    for _, writer in streams:
        writer.close()
