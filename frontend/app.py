"""The ASGI app and its OpenAPI document. FastAPI serves the pages; requests go straight to endpoints."""

import functools
import importlib.metadata
import re
from collections.abc import Awaitable, Container, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.errors import BatonError, InvalidRequest
from frontend.chat.answer import ChatCompletion, prepare_chat
from frontend.chat.request import ChatBody
from frontend.completions.answer import Completion, CompletionBody, prepare_completion
from frontend.http.exchange import Envelope, ErrorBody, Receive, Scope, Send, error_headers
from frontend.http.guards import OPEN_PATHS
from frontend.http.respond import Endpoint, Serve, generating
from frontend.http.services import Services
from frontend.messages.answer import MessageObject, MessagesError, TokenCount, count_tokens, prepare_message
from frontend.messages.request import Counted, MessagesBody
from frontend.pages import ModelBody, ModelInfo, ModelList, ModelPage, is_anthropics, pages
from frontend.responses.body import DeletedResponse, InputTokens, ItemList, ResponseBody, ResponseObject
from frontend.responses.items import INPUT_ITEMS
from frontend.responses.routes import ResponseRoutes
from frontend.responses.runs import ResponseState
from frontend.routing.health import Health
from frontend.tokenization import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerInfo,
    detokenize,
    tokenize,
    tokenizer_info,
)


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
        exception_handlers={HTTPException: _http_error, BatonError: _error, Exception: _error},
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
    kind = MessagesError if is_anthropics(request) else error_body(request.url.path)
    body = msgspec.json.encode(kind.of(error))
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
    return _refusal(request, refusal, {"allow": ", ".join(sorted(methods))} if methods else {})


async def _error(request: Request, error: Exception) -> Response:
    if not isinstance(error, BatonError):  # the framework raises it again after this, so that it is logged
        error = BatonError("Internal server error; see the server's log.")
    return _refusal(request, error, {name.decode(): value.decode() for name, value in error_headers(error)})


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


Struct = type[msgspec.Struct]

_REF = "#/components/schemas/{name}"
_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_STREAMED = (
    "The answer; if `stream` is true, server-sent events as the API defines them. An error after the first "
    "event is sent as the last event."
)
_HELLO = [{"role": "user", "content": "Hello there!"}]
EXAMPLES: Mapping[Struct, dict[str, Any]] = {
    ChatBody: {"messages": _HELLO, "reasoning_effort": "low", "max_completion_tokens": 100},
    CompletionBody: {"prompt": "Once upon a time", "max_tokens": 20},
    ResponseBody: {"input": "Hello there!", "reasoning": {"effort": "low"}, "max_output_tokens": 100},
    MessagesBody: {"max_tokens": 100, "messages": _HELLO},
    Counted: {"messages": _HELLO},
    TokenizeBody: {"prompt": "Hello there!"},
    DetokenizeBody: {"tokens": [0, 1]},
}
"""Bodies, each with a `model`."""


def _parameter(name: str, description: str, schema: str = "string", place: str = "query") -> dict[str, Any]:
    return {"name": name, "in": place, "schema": {"type": schema}, "description": description}


_REPEATABLE = (
    _parameter(
        "Idempotency-Key",
        "Of this request only, hard to guess, at most 255 characters. The events of a stream with one choice "
        "get ids.",
        place="header",
    ),
    _parameter(
        "Last-Event-ID", "With the same key and body: send the events after this one only.", place="header"
    ),
)
_EVENTS = (
    _parameter("stream", "Return the response's events.", "boolean"),
    _parameter("starting_after", "Sequence number of the last event already received.", "integer"),
)
_PAGED = (
    _parameter("limit", "Items per page, at most 100.", "integer"),
    _parameter("order", "`asc` or `desc` (the default), latest first."),
    _parameter("after", "Id of the last item of the previous page."),
)


class Operation(msgspec.Struct, frozen=True):
    """A route in the document. `answers` are the structs of which its answer is one, if it is JSON."""

    summary: str
    answers: tuple[Struct, ...] = ()
    body: Struct | None = None
    parameters: Sequence[Mapping[str, Any]] = ()
    is_streamed: bool = False

    def described(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = {"description": self.summary, "content": _json(*self.answers)}
        if self.is_streamed:
            answer["description"] = _STREAMED
            answer["content"]["text/event-stream"] = {}
        refusal = {"description": "An error; see the codes above.", "content": _json(error_body(path))}
        made: dict[str, Any] = {
            "summary": self.summary,
            "operationId": re.sub(r"\W+", "_", self.summary.lower()),
            "parameters": [*_in_path(path), *self.parameters],
            "responses": {"200": answer, "4XX": refusal, "5XX": refusal},
        }
        if path in OPEN_PATHS:
            made["security"] = []
            made["responses"]["503"] = answer
        if self.body is not None:
            content = _json(self.body)
            content["application/json"]["example"] = {"model": "openai/gpt-oss-120b", **EXAMPLES[self.body]}
            made["requestBody"] = {"required": True, "content": content}
        return made


def _in_path(path: str) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)", path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _json(*structs: Struct) -> dict[str, Any]:
    """The content that is one of these, if there are any."""
    refs = [_ref(struct) for struct in structs]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"application/json": {"schema": schema}} if refs else {}


def _ref(struct: Struct) -> dict[str, str]:
    return {"$ref": _REF.format(name=struct.__name__)}


def error_body(path: str) -> type[ErrorBody] | type[MessagesError]:
    """The error format of a route's API."""
    return MessagesError if path.startswith("/v1/messages") else ErrorBody


def _generation(summary: str, answer: Struct, body: Struct) -> Operation:
    return Operation(summary, (answer,), body, _REPEATABLE, is_streamed=True)


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): _generation("Create a chat completion", ChatCompletion, ChatBody),
    ("POST", "/v1/completions"): _generation("Create a raw completion", Completion, CompletionBody),
    ("POST", "/v1/responses"): _generation("Create a response", ResponseObject, ResponseBody),
    ("POST", "/v1/responses/input_tokens"): Operation(
        "Count a response's input tokens", (InputTokens,), ResponseBody
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(
        "Get a stored or background response", (ResponseObject,), parameters=_EVENTS, is_streamed=True
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation("Delete a response", (DeletedResponse,)),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        "Cancel a background response", (ResponseObject,)
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        "List a response's input items", (ItemList,), parameters=_PAGED
    ),
    ("POST", "/v1/messages"): _generation("Create a message", MessageObject, MessagesBody),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Count a message's input tokens", (TokenCount,), Counted
    ),
    ("POST", "/tokenize"): Operation("Tokenize a prompt", (TokenizeAnswer,), TokenizeBody),
    ("POST", "/detokenize"): Operation("Detokenize token ids", (DetokenizeAnswer,), DetokenizeBody),
    ("GET", "/tokenizer_info"): Operation("Get the tokenizer's settings", (TokenizerInfo,)),
    # The second shape is Anthropic's, for requests with an `anthropic-version` header.
    ("GET", "/v1/models"): Operation("List available models", (ModelList, ModelPage)),
    ("GET", "/v1/models/{model:path}"): Operation("Get a model", (ModelBody, ModelInfo)),
    ("GET", "/health"): Operation(
        "Readiness, with workers; a 503 has the same body, and `missing` lists the reasons", (Health,)
    ),
    ("GET", "/live"): Operation("Liveness"),
    ("GET", "/metrics"): Operation("Prometheus metrics"),
}


@functools.cache
def document() -> dict[str, Any]:
    """The OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path.replace(":path", ""), {})[method.lower()] = operation.described(path)
    errors = ["| status | code | meaning |", "|---|---|---|", *sorted(_errors(BatonError))]
    version = importlib.metadata.version("baton")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "description": "\n".join(errors)},
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": _KEY_SCHEMES},
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


def _schemas() -> dict[str, Any]:
    structs: dict[Struct, None] = dict.fromkeys([*INPUT_ITEMS.values(), ErrorBody, MessagesError])
    for operation in OPERATIONS.values():
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
