"""The ASGI app and its OpenAPI document. FastAPI serves the pages; requests go straight to endpoints."""

import importlib.metadata
import re
from collections.abc import Awaitable, Container, Iterator, Mapping
from functools import cache, partial
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.errors import BatonError, InvalidRequest
from frontend import chat, completions
from frontend.http.exchange import ErrorBody, MessagesError, Receive, Scope, Send, error_body, error_headers
from frontend.http.guards import OPEN_PATHS
from frontend.http.respond import Endpoint, Operation, Operations, Serve, Services, Struct
from frontend.messages import answer as messages
from frontend.pages import ModelBody, ModelInfo, ModelList, ModelPage, is_anthropics, pages
from frontend.responses.items import INPUT_ITEMS
from frontend.responses.routes import ResponseRoutes
from frontend.responses.runs import ResponseState
from frontend.routing.health import Health

PAGES: Operations = {
    # The second shape is Anthropic's, for requests with an `anthropic-version` header.
    ("GET", "/v1/models"): Operation(None, "List available models", (ModelList, ModelPage)),
    ("GET", "/v1/models/{model:path}"): Operation(None, "Get a model", (ModelBody, ModelInfo)),
    ("GET", "/health"): Operation(
        None, "Readiness, with workers; a 503 has the same body, and `missing` lists the reasons", (Health,)
    ),
    ("GET", "/live"): Operation(None, "Liveness"),
    ("GET", "/metrics"): Operation(None, "Prometheus metrics"),
}


def operations(responses: ResponseState) -> Operations:
    """What the OpenAPI document shows."""
    given = ResponseRoutes(responses).operations()
    return {**chat.OPERATIONS, **completions.OPERATIONS, **given, **messages.OPERATIONS, **PAGES}


class RouteNotFound(InvalidRequest, code="route_not_found", status=404):
    """Nothing is served under this path."""


class MethodNotAllowed(InvalidRequest, code="method_not_allowed", status=405):
    """The path is served, but not with this method."""


class App:
    """ASGI app that sends fixed paths directly to their endpoints. Other requests go through the framework,
    whose middleware would add three calls to every write of a stream."""

    def __init__(self, endpoints: Mapping[str, Endpoint], framework: FastAPI) -> None:
        self._endpoints = {path: endpoint for path, endpoint in endpoints.items() if "{" not in path}
        self._framework = framework

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["method"] == "HEAD":  # the server leaves the body out
            scope = {**scope, "method": "GET"}
        endpoint = self._endpoints.get(scope["path"])
        if endpoint is None or scope["method"] not in endpoint.methods:
            return self._framework(scope, receive, send)
        return endpoint(scope, receive, send)


def create_app(services: Services, responses: ResponseState) -> App:
    """The app over these services and responses, which the caller closes."""
    shown = operations(responses)
    methods: dict[str, dict[str, Serve]] = {}
    for (method, path), operation in shown.items():
        if operation.serve is not None:
            methods.setdefault(path, {})[method] = operation.serve
    endpoints = {path: Endpoint(path, served, services) for path, served in methods.items()}
    framework = FastAPIOffline(
        title="Baton",
        static_url="/docs/assets",
        redirect_slashes=False,
        exception_handlers={HTTPException: _http_error, BatonError: _error, Exception: _error},
    )
    for path, endpoint in endpoints.items():
        framework.router.routes.append(Route(path, endpoint))
    for path, page in pages(services).items():
        framework.router.routes.append(Route(path, page))
    framework.openapi = cache(partial(document, shown))  # type: ignore[method-assign]  # FastAPI's way
    return App(endpoints, framework)


def _refusal(request: Request, error: BatonError, headers: Mapping[str, str]) -> Response:
    kind = MessagesError if is_anthropics(request) else error_body(request.url.path)
    body = msgspec.json.encode(kind.of(error))
    return Response(body, error.status, headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """The response to an unknown route (404) or method (405)."""
    assert isinstance(error, HTTPException)
    kind = {404: RouteNotFound, 405: MethodNotAllowed}.get(error.status_code, InvalidRequest)
    path = request.url.path
    served = {route.path for route in request.app.routes if isinstance(route, Route)}
    headers = error.headers or {}
    allowed = f"; allowed: {headers['Allow']}" if "Allow" in headers else ""
    refusal = kind(f"{request.method} {path}: {error.detail}{allowed}.{hint(path, served)}")
    return _refusal(request, refusal, headers)


async def _error(request: Request, error: Exception) -> Response:
    if not isinstance(error, BatonError):  # the framework raises it again after this, so that it is logged
        error = BatonError("Internal server error; see the server's log.")
    return _refusal(request, error, {name.decode(): value.decode() for name, value in error_headers(error)})


def hint(path: str, served: Container[str]) -> str:
    """What to do about a path, which may lack the base URL's /v1, or have it twice."""
    meant = path.removeprefix("/v1") if path.startswith("/v1/") else f"/v1{path}"
    base = f" Did you mean {meant}? Check the client's base URL."
    return base if meant in served else " /docs lists what is served."


_REF = "#/components/schemas/{name}"
_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_STREAMED = (
    "The answer; if `stream` is true, server-sent events as the API defines them. An error after the first "
    "event is sent as the last event."
)
_REPEATABLE = {
    "Idempotency-Key": "Of this request only, hard to guess, at most 255 characters. The events of a stream "
    "with one choice get ids.",
    "Last-Event-ID": "With the same key and body: send the events after this one only.",
}
"""Headers of requests that generate."""


def _described(path: str, operation: Operation) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": operation.summary, "content": _json(*operation.answers)}
    if operation.is_streamed:
        answer["description"] = _STREAMED
        answer["content"]["text/event-stream"] = {}
    refusal = {"description": "An error; see the codes above.", "content": _json(error_body(path))}
    made: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", operation.summary.lower()),
        "parameters": list(_parameters(path, operation)),
        "responses": {"200": answer, "4XX": refusal, "5XX": refusal},
    }
    if path in OPEN_PATHS:
        made["security"] = []
        made["responses"]["503"] = answer
    if operation.body is not None:
        content = _json(operation.body)
        content["application/json"]["example"] = {"model": "openai/gpt-oss-120b", **operation.example}
        made["requestBody"] = {"required": True, "content": content}
    return made


def _parameters(path: str, operation: Operation) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)", path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    if operation.body is not None and operation.is_streamed:
        for name, description in _REPEATABLE.items():
            yield {"name": name, "in": "header", "schema": {"type": "string"}, "description": description}
    if operation.query is not None:
        (struct,) = msgspec.json.schema_components([operation.query])[1].values()
        for name, schema in struct["properties"].items():
            yield {"name": name, "in": "query", "schema": schema}


def _json(*structs: Struct) -> dict[str, Any]:
    """The content that is one of these, if there are any."""
    refs = [_ref(struct) for struct in structs]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"application/json": {"schema": schema}} if refs else {}


def _ref(struct: Struct) -> dict[str, str]:
    return {"$ref": _REF.format(name=struct.__name__)}


def document(shown: Operations) -> dict[str, Any]:
    """The OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in shown.items():
        paths.setdefault(path.replace(":path", ""), {})[method.lower()] = _described(path, operation)
    errors = ["| status | code | meaning |", "|---|---|---|", *sorted(_errors(BatonError))]
    version = importlib.metadata.version("baton")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "description": "\n".join(errors)},
        "paths": paths,
        "components": {"schemas": _schemas(shown), "securitySchemes": _KEY_SCHEMES},
        # Without --api-keys-file no key is needed.
        "security": [{}, *({name: []} for name in _KEY_SCHEMES)],
    }


def _errors(kind: type[BatonError]) -> Iterator[str]:
    """A row of each code that this process knows; its meaning is its class's docstring."""
    meaning = "Internal server error." if kind is BatonError else " ".join((kind.__doc__ or "").split())
    if "code" in vars(kind):
        yield f"| {kind.status} | `{kind.code}` | {meaning} |"
    for each in kind.__subclasses__():
        yield from _errors(each)


def _schemas(shown: Operations) -> dict[str, Any]:
    structs: dict[Struct, None] = dict.fromkeys([*INPUT_ITEMS.values(), ErrorBody, MessagesError])
    for operation in shown.values():
        structs |= dict.fromkeys([*operation.answers, operation.body or ErrorBody])
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REF)
    for schema in schemas.values():
        schema["description"] = " ".join(schema["description"].split())
    # `frontend.responses.items` validates items, after the body's types.
    items = [_item(kind, struct) for kind, struct in INPUT_ITEMS.items()]
    either = [{"type": "string"}, {"type": "array", "items": {"anyOf": items}}, {"type": "null"}]
    schemas["ResponseBody"]["properties"]["input"] = {"anyOf": either, "default": None}
    return schemas


def _item(kind: str, struct: Struct) -> dict[str, Any]:
    tag = {"properties": {"type": {"const": kind}}, "required": [] if kind == "message" else ["type"]}
    return {"allOf": [_ref(struct), tag]}
