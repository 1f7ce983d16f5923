"""Workers in the registry that are not what they say: no request notices, and /health names them."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from baton.files import FilesDiscovery
from baton.messages import (
    GenerateRequest,
    KvHandoff,
    Reply,
    Request,
    Role,
    TokenChunk,
    WorkerInfo,
    WorkerStats,
)
from baton.tcp import TcpTransport
from tests.stack import MODEL, Stack
from tests.waiting import PATIENCE_S, wait_for

UNKNOWN = 1_000_000  # no token id of the demo model
NAMES = ("p-silent", "d-silent", "p-closed", "d-closed", "p-odd", "d-odd")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One mocker of each role, and a frontend that started when the strangers were there."""
    stack = Stack(tmp_path_factory.mktemp("stack"))
    try:
        for mode in ("prefill", "decode"):
            stack.worker(mode)
        with strangers(Path(stack.environ["BATON_FILE_REGISTRY"])):
            stack.frontend()
            wait_for(lambda: stack.health().get("status") == "healthy")
            yield stack
    finally:
        stack.stop()


@contextmanager
def strangers(folder: Path) -> Iterator[None]:
    """Registered as long as the context lasts, by a thread with its own event loop."""
    ready, done = threading.Event(), threading.Event()

    async def main() -> None:
        async with registered(FilesDiscovery(folder)):
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=[main()])
    thread.start()
    try:
        assert ready.wait(2 * PATIENCE_S)
        yield
    finally:
        done.set()
        thread.join()


@asynccontextmanager
async def registered(discovery: FilesDiscovery) -> AsyncIterator[None]:
    """Like the genuine ones, except for their names and addresses."""
    async with asyncio.timeout(PATIENCE_S), aclosing(discovery.watch()) as snapshots:
        genuine = await anext(found async for found in snapshots if len({w.role for w in found}) == 2)
    of_role = {worker.role: worker for worker in genuine}
    async with AsyncExitStack() as exits:
        silent = exits.enter_context(socket.create_server(("127.0.0.1", 0)))  # accepts, says nothing
        with socket.create_server(("127.0.0.1", 0)) as listener:
            closed = listener.getsockname()[1]
        for name in NAMES:
            info = of_role[Role.PREFILL if name.startswith("p") else Role.DECODE]
            port = silent.getsockname()[1] if "silent" in name else closed
            address = f"tcp://127.0.0.1:{port}/{name}.0"
            if "odd" in name:
                address = await exits.enter_async_context(TcpTransport().serve(name, odd))
            await exits.enter_async_context(discovery.register(renamed(info, name, address)))
        yield


def renamed(info: WorkerInfo, name: str, address: str) -> WorkerInfo:
    return msgspec.structs.replace(info, worker_id=name, incarnation=name, address=address, is_ready=True)


async def odd(request: Request) -> AsyncGenerator[Reply, None]:
    """Answers probes, and requests with tokens that do not exist."""
    if not isinstance(request, GenerateRequest):
        yield WorkerStats()
    elif request.handoff is not None:
        yield TokenChunk((UNKNOWN,))
    else:
        yield KvHandoff(
            worker_id="p-odd",
            incarnation="p-odd",
            first_token=UNKNOWN,
            num_prompt_tokens=len(request.token_ids),
            ttl_s=60,
            engine_state=b"",
        )


def test_no_request_notices_strangers_and_health_names_them(stack: Stack) -> None:
    asked = {"model": MODEL, "prompt": "one two three", "max_tokens": 20, "seed": 5}
    answers = []
    for _ in range(12):
        answer = httpx.post(f"{stack.url}/v1/completions", json=asked, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        answers.append(answer.json()["choices"][0]["text"])
    assert len(set(answers)) == 1

    wait_for(lambda: len(stack.health()["refused"]) == 2)
    health = stack.health()
    assert sorted(health["lost"]) == ["d-closed", "d-silent", "p-closed", "p-silent"]
    assert sorted(refused.partition(":")[0] for refused in health["refused"]) == ["d-odd", "p-odd"]
    assert {instance["worker_id"] for instance in health["instances"]}.isdisjoint(NAMES)
