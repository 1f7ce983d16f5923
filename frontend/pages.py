"""What is served besides the APIs' requests: models, health, metrics, the live page and its figures."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from frontend.http.respond import Services
from frontend.metrics import CONTENT_TYPE, Scrape
from frontend.routing.fleet import Fleet
from frontend.verdict import explain, find, query_of

_GUARDED = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_FRESH = {"cache-control": "no-store", "x-accel-buffering": "no", **_GUARDED}

Page = Callable[[Request], Awaitable[Response]]


class ModelBody(msgspec.Struct, kw_only=True):
    """A served model. `context_length` is in tokens, for prompt and answer together; `max_model_len` is the
    same value under vLLM's name."""

    id: str
    created: int
    context_length: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "baton"


class ModelList(msgspec.Struct, kw_only=True):
    """The response of `GET /v1/models`."""

    data: list[ModelBody]
    object: Literal["list"] = "list"


class ModelInfo(msgspec.Struct, kw_only=True):
    """A served model, for Anthropic's clients. `created_at` is an RFC 3339 time, `max_input_tokens` the
    context length."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    type: Literal["model"] = "model"


class ModelPage(msgspec.Struct, kw_only=True):
    """The response of `GET /v1/models` for Anthropic's clients: one page with all models."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def is_anthropics(request: Request) -> bool:
    """Whether the client speaks Anthropic's API; both APIs have `/v1/models`."""
    return "anthropic-version" in request.headers


def pages(services: Services) -> Mapping[str, Page]:
    """The pages by path."""
    fleet = services.fleet

    async def health(_: Request) -> Response:
        found = await fleet.look()
        return _json(found, 200 if found.status == "healthy" else 503)

    async def live(_: Request) -> Response:
        return _json({"status": "live"})

    async def metrics(request: Request) -> Response:
        others, with_keys = await services.others(Scrape()), request.scope.get("is_admin", True)
        page = services.metrics.page(await fleet.stats(), others, with_keys=with_keys)
        return Response(page, headers={"content-type": CONTENT_TYPE})

    async def look(request: Request) -> Response:
        with_ids = request.scope.get("is_admin", True)
        if "text/event-stream" not in request.headers.get("accept", ""):
            found = await services.snapshots.latest(with_ids=with_ids)
            return Response(found, media_type="application/json", headers=_FRESH)
        events = services.snapshots.stream(with_ids=with_ids)
        return StreamingResponse(events, media_type="text/event-stream", headers=_FRESH)

    async def requests(request: Request) -> Response:
        query = query_of(request.query_params.multi_items())
        found = [find(services.metrics.records, query), *await services.others(query)]
        return _json(await asyncio.to_thread(explain, query, found))  # streams go on meanwhile

    found: dict[str, Page] = {"/health": health, "/live": live, "/metrics": metrics}
    found |= {"/fleet": look, "/requests": requests, **_model_pages(fleet)}
    return found | (_live_page() if services.has_page else {})


def _live_page() -> dict[str, Page]:
    files = StaticFiles(directory=Path(__file__).with_name("page"))

    async def page(request: Request) -> Response:
        found = await files.get_response(request.path_params.get("name", "index.html"), request.scope)
        found.headers.update({"cache-control": "no-cache", **_GUARDED})
        return found

    return {"/": page, "/page/{name}": page}


def _model_pages(fleet: Fleet) -> dict[str, Page]:
    created = int(time.time())
    created_at = datetime.fromtimestamp(created, UTC).isoformat()

    def body(name: str) -> ModelBody:
        length = fleet.served(name).context_length
        return ModelBody(id=name, created=created, context_length=length, max_model_len=length)

    def info(name: str) -> ModelInfo:
        length = fleet.served(name).context_length
        return ModelInfo(id=name, display_name=name, created_at=created_at, max_input_tokens=length)

    async def models(request: Request) -> Response:
        names = fleet.models()
        if not is_anthropics(request):
            return _json(ModelList(data=list(map(body, names))))
        first_id, last_id = (names[0], names[-1]) if names else (None, None)
        return _json(ModelPage(data=list(map(info, names)), first_id=first_id, last_id=last_id))

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        return _json(info(name) if is_anthropics(request) else body(name))

    # Names may contain slashes: openai/gpt-oss-120b.
    return {"/v1/models": models, "/v1/models/{model:path}": model}


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
