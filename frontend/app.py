"""The ASGI app: routes, and error responses for unknown ones; the only web-framework import."""

import dataclasses
import html
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.errors import BatonError, InvalidRequest
from frontend import openapi
from frontend.chat.answer import prepare_chat
from frontend.completions.answer import prepare_completion
from frontend.http.errors import Envelope, ErrorBody, error_headers
from frontend.http.exchange import Receive, Scope, Send
from frontend.http.respond import Endpoint, Serve, generating
from frontend.http.services import FleetView, Services
from frontend.instead import COMPACT, hint
from frontend.messages.answer import MessagesError, MessagesRoutes
from frontend.metrics import CONTENT_TYPE
from frontend.models import ModelBody, ModelInfo, ModelList, ModelPage
from frontend.openapi import reference_page
from frontend.responses.routes import ResponseRoutes
from frontend.responses.runs import ResponseState
from frontend.tokenization import detokenize, tokenize, tokenizer_info
from frontend.turn.seal import Seal


@dataclasses.dataclass(frozen=True)
class ServerState:
    """State across requests: stored responses, and the key that signs reasoning."""

    responses: ResponseState = dataclasses.field(default_factory=ResponseState)
    seal: Seal = dataclasses.field(default_factory=Seal)


def routes(state: ServerState) -> dict[tuple[str, str], Serve]:
    """The Serve of each (method, path)."""
    return {
        ("POST", "/v1/chat/completions"): generating(prepare_chat),
        ("POST", "/v1/completions"): generating(prepare_completion),
        **ResponseRoutes(state.responses, state.seal).table(),
        **MessagesRoutes(state.seal).table(),
        ("POST", "/tokenize"): tokenize,
        ("POST", "/detokenize"): detokenize,
        ("GET", "/tokenizer_info"): tokenizer_info,
    }


class RouteNotFound(BatonError):
    """Nothing is served under this path."""

    code = "route_not_found"
    status = 404
    kind = "invalid_request_error"


class MethodNotAllowed(BatonError):
    """The path is served, but not with this method."""

    code = "method_not_allowed"
    status = 405
    kind = "invalid_request_error"


class App:
    """ASGI app that sends fixed paths directly to their endpoints. Other requests go through the framework,
    whose middleware would add three calls to every write of a stream."""

    def __init__(self, endpoints: Mapping[tuple[str, str], Endpoint], framework: Starlette) -> None:
        self._endpoints = {key: endpoint for key, endpoint in endpoints.items() if "{" not in key[1]}
        self._framework = framework

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        await (endpoint or self._framework)(scope, receive, send)


class ByMethod:
    """ASGI app of one path, for all methods: otherwise `GET /v1/responses/input_tokens` would be that of a
    response with this id."""

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._endpoints = dict(endpoints)
        if "GET" in endpoints:
            self._endpoints["HEAD"] = endpoints["GET"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        endpoint = self._endpoints.get(scope["method"])
        if endpoint is None:
            raise HTTPException(405, headers={"allow": ", ".join(self._endpoints)})
        await endpoint(scope, receive, send)


def create_app(services: Services, state: ServerState) -> App:
    """The app over these services and this state, which the caller closes."""
    endpoints = {
        key: Endpoint(key[1], serve, services, envelope_of(key[1])) for key, serve in routes(state).items()
    }
    return App(endpoints, _framework(services, endpoints))


def envelope_of(path: str) -> Envelope:
    """The error format of a route's API."""
    return MessagesError.of if path.startswith("/v1/messages") else ErrorBody.of


def _is_anthropics(request: Request) -> bool:
    """Whether the client speaks Anthropic's API; both APIs have `/v1/models`."""
    return "anthropic-version" in request.headers


def _refusal(request: Request, error: BatonError, headers: Mapping[str, str]) -> Response:
    envelope = MessagesError.of if _is_anthropics(request) else envelope_of(request.url.path)
    return _json(envelope(error), error.status, dict(headers))


def _framework(services: Services, endpoints: Mapping[tuple[str, str], Endpoint]) -> Starlette:
    routes = []
    for path in dict.fromkeys(path for _, path in endpoints):  # all paths, so that a wrong method is a 405
        methods = {method: endpoint for (method, p), endpoint in endpoints.items() if p == path}
        routes.append(Route(path, ByMethod(methods)))
    app = Starlette(
        routes=[
            Route(COMPACT, _absent, methods=["GET", "POST"]),
            *routes,
            *_reading_routes(services),
            *_pages(services),
        ],
        exception_handlers={
            HTTPException: _http_error,
            BatonError: _baton_error,
            Exception: _unexpected_error,
        },
    )
    app.router.redirect_slashes = False
    return app


def _model_routes(fleet: FleetView) -> list[Route]:
    started_s = int(time.time())

    def model_body(name: str) -> ModelBody:
        length = fleet.served(name).context_length
        return ModelBody(id=name, created=started_s, context_length=length, max_model_len=length)

    def model_info(name: str) -> ModelInfo:
        started = datetime.fromtimestamp(started_s, UTC).isoformat()
        length = fleet.served(name).context_length
        return ModelInfo(id=name, display_name=name, created_at=started, max_input_tokens=length)

    async def models(request: Request) -> Response:
        names = fleet.models()
        if _is_anthropics(request):
            return _json(ModelPage.of([model_info(name) for name in names]))
        return _json(ModelList(data=[model_body(name) for name in names]))

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        return _json(model_info(name) if _is_anthropics(request) else model_body(name))

    # Names may contain slashes: openai/gpt-oss-120b.
    return [Route("/v1/models", models), Route("/v1/models/{model:path}", model)]


def _reading_routes(services: Services) -> list[Route]:
    fleet = services.fleet

    async def health(_: Request) -> Response:
        found = fleet.health()
        return _json(found, 200 if found.status == "healthy" else 503)

    async def live(_: Request) -> Response:
        return Response(b'{"status":"live"}', media_type="application/json")

    async def metrics(_: Request) -> Response:
        page = services.metrics.page(await fleet.stats(), await services.other_metrics())
        return Response(page, headers={"content-type": CONTENT_TYPE.decode()})

    return [
        *_model_routes(fleet),
        Route("/health", health),
        Route("/live", live),
        Route("/metrics", metrics),
    ]


def _pages(services: Services) -> list[Route]:
    document = openapi.page()

    async def described(_: Request) -> Response:
        return Response(msgspec.json.encode(document), media_type="application/json")

    async def docs(_: Request) -> Response:
        return Response(reference_page(document), media_type="text/html; charset=utf-8")

    async def about(_: Request) -> Response:
        return Response(_page(services.fleet.models()), media_type="text/html; charset=utf-8")

    return [Route("/openapi.json", described), Route("/docs", docs), Route("/", about)]


def _page(models: Sequence[str]) -> str:
    """The HTML page at `/`."""
    model = models[0] if models else "openai/gpt-oss-120b"
    listed = ", ".join(map(html.escape, models)) or "none yet; see <a href='health'>/health</a>"
    body = html.escape(f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}')
    return f"""<!doctype html><meta charset="utf-8"><title>Baton</title>
<h1>Baton</h1><p>Serves gpt-oss through OpenAI's and Anthropic's APIs. Models: {listed}.</p>
<p><a href="health">health</a> · <a href="v1/models">models</a> · <a href="docs">API</a> ·
<a href="metrics">metrics</a></p>
<pre>curl -s http://HOST:PORT/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'</pre>
"""


def _json(body: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """The response to an unknown route (404) or method (405)."""
    assert isinstance(error, HTTPException)
    kind = {404: RouteNotFound, 405: MethodNotAllowed}.get(error.status_code, InvalidRequest)
    path = request.url.path
    served = {getattr(route, "path", "") for route in request.app.router.routes}
    refusal = kind(f"{request.method} {path}: {error.detail}.{hint(path, served)}")
    return _refusal(request, refusal, error.headers or {})


async def _absent(_: Request) -> Response:
    """A path that a route with a parameter would match."""
    raise HTTPException(404)


async def _baton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    return _refusal(request, error, {name.decode(): value.decode() for name, value in error_headers(error)})


async def _unexpected_error(request: Request, error: Exception) -> Response:  # noqa: ARG001  the framework's call
    # The framework re-raises the error once this is sent, so that the server logs it with its traceback.
    return _json(ErrorBody.of(BatonError("Internal server error; see the server's log.")), 500)
