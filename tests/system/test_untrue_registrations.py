"""Workers in the registry that are not what they say: no request notices, and /health names them."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import msgspec

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
from tests.stack import Stack
from tests.waiting import PATIENCE_S, wait_for

UNKNOWN = 1_000_000  # no token id of the demo model
NAMES = ("p-silent", "d-silent", "p-closed", "d-closed", "p-odd", "d-odd")


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


async def test_no_request_notices_them_and_health_names_them(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.worker("prefill"), stack.worker("decode")
        async with registered(FilesDiscovery(Path(stack.environ["BATON_FILE_REGISTRY"]))):
            stack.frontend()  # which finds them at its start
            await asyncio.to_thread(check, stack)


def check(stack: Stack) -> None:
    wait_for(lambda: stack.health().get("status") == "healthy")
    fields = {"prompt": "one two three", "max_tokens": 20, "seed": 5}
    answers = [stack.answer("/v1/completions", **fields) for _ in range(12)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1

    wait_for(lambda: len(stack.health()["refused"]) == 2)
    health = stack.health()
    assert sorted(health["lost"]) == ["d-closed", "d-silent", "p-closed", "p-silent"]
    assert sorted(refused.partition(":")[0] for refused in health["refused"]) == ["d-odd", "p-odd"]
    assert {instance["worker_id"] for instance in health["instances"]}.isdisjoint(NAMES)
