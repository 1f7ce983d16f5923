"""The ASGI app: FastAPI serves the documentation and the pages; requests go straight to their endpoints."""

import re
from collections.abc import Awaitable, Container, Mapping

import msgspec
from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.errors import BatonError, InvalidRequest
from frontend.chat.answer import prepare_chat
from frontend.completions.answer import prepare_completion
from frontend.http.exchange import Envelope, Receive, Scope, Send, error_headers
from frontend.http.respond import Endpoint, Serve, generating
from frontend.http.services import Services
from frontend.messages.answer import MessagesError, count_tokens, prepare_message
from frontend.openapi import document, error_body
from frontend.pages import is_anthropics, pages
from frontend.responses.routes import ResponseRoutes
from frontend.responses.runs import ResponseState
from frontend.tokenization import detokenize, tokenize, tokenizer_info


def routes(responses: ResponseState) -> dict[tuple[str, str], Serve]:
    """The Serve of each (method, path)."""
    return {
        ("POST", "/v1/chat/completions"): generating(prepare_chat),
        ("POST", "/v1/completions"): generating(prepare_completion),
        **ResponseRoutes(responses).table(),
        ("POST", "/v1/messages"): generating(prepare_message),
        ("POST", "/v1/messages/count_tokens"): count_tokens,
        ("POST", "/tokenize"): tokenize,
        ("POST", "/detokenize"): detokenize,
        ("GET", "/tokenizer_info"): tokenizer_info,
    }


class RouteNotFound(InvalidRequest, code="route_not_found", status=404):
    """Nothing is served under this path."""


class MethodNotAllowed(InvalidRequest, code="method_not_allowed", status=405):
    """The path is served, but not with this method."""


class App:
    """ASGI app that sends fixed paths directly to their endpoints. Other requests go through the framework,
    whose middleware would add three calls to every write of a stream."""

    def __init__(self, endpoints: Mapping[tuple[str, str], Endpoint], framework: FastAPI) -> None:
        self._endpoints = {key: endpoint for key, endpoint in endpoints.items() if "{" not in key[1]}
        self._framework = framework

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["method"] == "HEAD":  # the server leaves the body out
            scope = {**scope, "method": "GET"}
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        return (endpoint or self._framework)(scope, receive, send)


class _ResponseId(StringConvertor):
    """`GET /v1/responses/input_tokens` is not about a response with this id."""

    regex = "(?!(?:input_tokens|compact)(?:/|$))[^/]+"


register_url_convertor("response_id", _ResponseId())


def create_app(services: Services, responses: ResponseState) -> App:
    """The app over these services and responses, which the caller closes."""
    endpoints = {
        (method, path): Endpoint(path, serve, services, envelope_of(path))
        for (method, path), serve in routes(responses).items()
    }
    framework = FastAPIOffline(
        title="Baton",
        static_url="/docs/assets",
        redirect_slashes=False,
        exception_handlers={
            HTTPException: _http_error,
            BatonError: _baton_error,
            Exception: _unexpected_error,
        },
    )
    for (method, path), endpoint in endpoints.items():
        route = path.replace("{response_id}", "{response_id:response_id}")
        framework.router.routes.append(Route(route, endpoint, methods=[method]))
    for path, page in pages(services).items():
        framework.router.routes.append(Route(path, page))
    framework.openapi = document  # type: ignore[method-assign]  # FastAPI's way
    return App(endpoints, framework)


def envelope_of(path: str) -> Envelope:
    """The error format of a route's API."""
    return error_body(path).of


def _refusal(request: Request, error: BatonError, headers: Mapping[str, str]) -> Response:
    envelope = MessagesError.of if is_anthropics(request) else envelope_of(request.url.path)
    body = msgspec.json.encode(envelope(error))
    return Response(body, error.status, headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """The response to an unknown route (404) or method (405)."""
    assert isinstance(error, HTTPException)
    kind = {404: RouteNotFound, 405: MethodNotAllowed}.get(error.status_code, InvalidRequest)
    path = request.url.path
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    refusal = kind(f"{request.method} {path}: {error.detail}.{hint(path, {route.path for route in routes})}")
    # Of all routes of the path: the framework names those of the first.
    methods = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
    methods |= {"HEAD"} if "GET" in methods else set()
    return _refusal(request, refusal, {"allow": ", ".join(sorted(methods))} if methods else {})


async def _baton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    return _refusal(request, error, {name.decode(): value.decode() for name, value in error_headers(error)})


async def _unexpected_error(request: Request, error: Exception) -> Response:  # noqa: ARG001  the framework's call
    # The framework re-raises the error once this is sent, so that the server logs it with its traceback.
    return _refusal(request, BatonError("Internal server error; see the server's log."), {})


_INSTEAD = {
    "/v1/responses/compact": "Shorten `input`, or begin anew without `previous_response_id`.",
    "/v1/conversations(/.*)?": "Responses are stored: continue one with `previous_response_id`.",
    "/v1/(assistants|threads)(/.*)?": "Use /v1/responses.",
    "/v1/(messages/)?batches(/.*)?": "Send the requests at once; they are batched while they run.",
    "/v1/(files|uploads)(/.*)?": "Send the text in the request itself.",
    "/v1/(embeddings|images|audio|moderations|realtime)(/.*)?": "This server generates text only.",
    "/openai/(deployments/.*|v1/.*|responses(/.*)?)": "Azure's paths are not served: set the base URL to "
    "http://HOST:PORT/v1 and name the `model` in the body.",
}
"""Paths of OpenAI's and other servers that are not served: what is there instead."""


def hint(path: str, served: Container[str]) -> str:
    """A sentence for an unknown path; empty if there is nothing to say. `served` are the known paths: the
    base URL may lack /v1, or have it twice."""
    meant = path.removeprefix("/v1") if path.startswith("/v1/") else f"/v1{path}"
    if meant in served:
        return f" Did you mean {meant}? Check the client's base URL."
    found = (
        sentence
        for pattern, sentence in _INSTEAD.items()
        if re.fullmatch(pattern, path) or re.fullmatch(pattern, f"/v1{path}")
    )
    return f" {next(found, '')}".rstrip()
