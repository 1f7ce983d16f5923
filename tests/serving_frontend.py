"""A frontend's whole process in this one: its settings, its socket, its end; the workers are scripted."""

import asyncio
import dataclasses
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from baton.connect import Wires
from baton.messages import GenerateRequest, Reply, TokenChunk, Usage, WorkerInfo
from frontend import __main__ as frontend_main
from frontend.flags import FrontendSettings, read_credentials
from frontend.processes.siblings import Siblings
from frontend.responses.store import MEMORY
from frontend.routing.admission import RoutingSettings
from frontend.text.tokenizer import ModelTokenizer
from tests.scripted_workers import Script, ScriptedWorkers
from tests.waiting import PATIENCE_S

DEMO = Path("models/demo")
MODEL = "m"


class Workers(ScriptedWorkers):
    """Their registry shows them once `may_tell` is set, until it is `broken`; counts what is closed."""

    def __init__(self, **scripts: Script) -> None:
        super().__init__(**scripts)
        self.may_tell = asyncio.Event()
        self.may_tell.set()
        self.broken = asyncio.Event()
        self.num_closed = 0

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        await self.may_tell.wait()
        watched = super().watch()
        try:
            yield _roomy(await anext(watched))
            while True:
                change = asyncio.ensure_future(anext(watched))
                breaking = asyncio.ensure_future(self.broken.wait())
                await asyncio.wait([change, breaking], return_when=asyncio.FIRST_COMPLETED)
                breaking.cancel()
                if not change.done():
                    change.cancel()
                    raise RuntimeError("the registry broke")
                yield _roomy(change.result())
        finally:
            await asyncio.sleep(0)  # `change` has ended
            await watched.aclose()

    async def close(self) -> None:
        self.num_closed += 1


def _roomy(workers: tuple[WorkerInfo, ...]) -> tuple[WorkerInfo, ...]:
    return tuple(msgspec.structs.replace(worker, context_length=8192) for worker in workers)


def saying(text: str) -> Script:
    """Answers with this text, in Harmony."""

    async def script(request: GenerateRequest) -> AsyncGenerator[Reply, None]:
        token_ids = ModelTokenizer.load(DEMO).encode_text(text, allow_special=True)
        yield TokenChunk(tuple(token_ids), "stop", Usage(len(request.token_ids), 0, len(token_ids)))

    return script


class Held:
    """Answers with a token, waits until it `goes_on`, and answers the rest."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def __call__(self, request: GenerateRequest) -> AsyncGenerator[Reply, None]:
        yield TokenChunk((10,))
        self.began.set()
        await self.goes_on.wait()
        yield TokenChunk((11, 12, 13), "length", Usage(2, 0, 4))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ScriptedWires(Wires):
    workers: Workers

    def discovery(self) -> Workers:
        return self.workers

    def transport(self) -> Workers:
        return self.workers


class Frontend:
    """A frontend process, `serving`, and its client."""

    def __init__(self, workers: Workers, siblings: Siblings | None, settings: dict[str, Any]) -> None:
        wired: dict[str, Any] = {
            "model_path": DEMO,
            "response_store": MEMORY,
            "wires": _ScriptedWires(workers=workers),
        }
        of_routing = {field.name for field in dataclasses.fields(RoutingSettings)} & settings.keys()
        routing = RoutingSettings(**{name: settings.pop(name) for name in of_routing})
        self.settings = FrontendSettings(**wired | settings, routing=routing)
        self.shutdown = asyncio.Event()
        self.is_listening = asyncio.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        port = self.listener.getsockname()[1]
        own = siblings or Siblings()
        own.listening = self.is_listening.set
        credentials = read_credentials(self.settings)
        self.serving = asyncio.create_task(
            frontend_main.serve(self.settings, credentials, self.listener, own, self.shutdown)
        )
        each_its_own = httpx.Limits(max_keepalive_connections=0)  # for which a drain would wait
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", verify=False, timeout=PATIENCE_S, limits=each_its_own
        )

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(path)

    async def post(self, path: str, **body: Any) -> Any:
        """The JSON of the answer."""
        return (await self.http.post(path, json=body)).json()

    async def complete(self, key: str = "", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 4} | fields
        return await self.http.post("/v1/completions", json=body, headers={"x-api-key": key})

    async def respond(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "input": "Hi", "max_output_tokens": 4} | fields
        return await self.http.post("/v1/responses", json=body)

    async def end(self) -> int:
        """The status after a drain, which ends long before anything times out."""
        self.shutdown.set()
        async with asyncio.timeout(PATIENCE_S / 3):
            return await self.serving


@asynccontextmanager
async def process(
    workers: Workers, siblings: Siblings | None = None, **settings: Any
) -> AsyncIterator[Frontend]:
    """A frontend that serves during the context, unless it has ended before."""
    frontend = Frontend(workers, siblings, settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontend_main, "leave_start_uncollected", lambda: None)  # the tests' own objects too
        try:
            yield frontend
        finally:
            frontend.shutdown.set()
            await asyncio.wait([frontend.serving], timeout=PATIENCE_S)
            frontend.listener.close()
            await frontend.http.aclose()


@asynccontextmanager
async def serving(workers: Workers, **settings: Any) -> AsyncIterator[Frontend]:
    """A frontend that accepts connections."""
    async with asyncio.timeout(PATIENCE_S), process(workers, **settings) as frontend:
        await frontend.is_listening.wait()
        yield frontend
