"""The OpenAPI document (the routes, with the schemas of their structs), and the page that shows it."""

import html
import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from baton.errors import (
    BatonError,
    BrokerLost,
    DeadlineExceeded,
    EngineFailure,
    HandoffFailed,
    HandoffStalled,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    NotResumable,
    NoWorkers,
    Overloaded,
    WorkerLost,
)
from frontend.chat.answer import ChatCompletion
from frontend.chat.body import ChatBody
from frontend.completions.answer import Completion, CompletionBody
from frontend.http.answer import StreamChanged
from frontend.http.authentication import InvalidApiKey
from frontend.http.bodies import BodiesFull
from frontend.http.body import TooManyParts
from frontend.http.browsers import OriginNotAllowed
from frontend.http.connection import HeadTooLarge, RequestTooSlow
from frontend.http.errors import BodyTooLarge, EncodedBody, ErrorBody
from frontend.http.hosts import HostNotAllowed
from frontend.http.limits import RateLimited
from frontend.messages.answer import MessageObject, MessagesError, TokenCount
from frontend.messages.body import Counted, MessagesBody, ThreadNotFound
from frontend.models import ModelBody, ModelInfo, ModelList, ModelPage
from frontend.responses.body import DeletedResponse, InputTokens, ItemList, ResponseBody, ResponseObject
from frontend.responses.create import PreviousNotFound
from frontend.responses.input import GIVEN_ITEMS
from frontend.responses.routes import ResponseNotFound
from frontend.responses.store import StoreFailure
from frontend.routing.health import Health
from frontend.text.served import ContextTooLong
from frontend.tokenization import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerInfo,
)

Errors = tuple[type[BatonError], ...]

_REF = "#/components/schemas/{name}"
_STRUCTS = (
    ChatBody, CompletionBody, ChatCompletion, Completion, ModelBody, ModelList, ModelInfo,
    ModelPage, ErrorBody, Health,
    ResponseBody, ResponseObject, ItemList, DeletedResponse, *dict.fromkeys(GIVEN_ITEMS.values()),
    InputTokens, MessagesBody, Counted, MessageObject, TokenCount, MessagesError,
    TokenizeBody, TokenizeAnswer, DetokenizeBody, DetokenizeAnswer, TokenizerInfo,
)  # fmt: skip
_ASKING: Errors = (
    InvalidRequest, InvalidApiKey, RateLimited, OriginNotAllowed, HostNotAllowed, ModelNotFound, BodyTooLarge,
    EncodedBody, TooManyParts, BodiesFull, RequestTooSlow, HeadTooLarge, NoWorkers, BatonError,
)  # fmt: skip
_GENERATING: Errors = (
    *_ASKING, ContextTooLong, Overloaded, EngineFailure, NotResumable, WorkerLost, BrokerLost, HandoffFailed,
    HandoffStalled, NotReady, DeadlineExceeded,
)  # fmt: skip
_STORED: Errors = (InvalidRequest, InvalidApiKey, ResponseNotFound, StoreFailure)
# Without --api-keys-file no key is needed, so the document's `security` allows that, too.
_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_WITH_RETRY_AFTER = frozenset({429, 503})

_MODEL = "openai/gpt-oss-120b"
EXAMPLES: Mapping[type[msgspec.Struct], dict[str, Any]] = {
    ChatBody: {
        "model": _MODEL,
        "messages": [{"role": "user", "content": "Hello there!"}],
        "reasoning_effort": "low",
        "max_completion_tokens": 100,
    },
    CompletionBody: {"model": _MODEL, "prompt": "Once upon a time", "max_tokens": 20},
    ResponseBody: {
        "model": _MODEL,
        "instructions": "Be brief.",
        "input": [{"type": "message", "role": "user", "content": "Hello there!"}],
        "reasoning": {"effort": "low"},
        "max_output_tokens": 100,
    },
    MessagesBody: {
        "model": _MODEL,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "Hello there!"}],
    },
    Counted: {"model": _MODEL, "messages": [{"role": "user", "content": "Hello there!"}]},
    TokenizeBody: {"prompt": "Hello there!"},
    DetokenizeBody: {"tokens": [0, 1]},
}


def page() -> dict[str, Any]:
    """The OpenAPI document."""
    tokens = _operation("Tokenize a prompt", TokenizeAnswer, _ASKING, body=TokenizeBody)
    text = _operation("Detokenize token ids", DetokenizeAnswer, _ASKING, body=DetokenizeBody)
    model = _operation("Get a model", ModelBody, (InvalidApiKey, ModelNotFound, NoWorkers))
    _add_anthropics(model, ModelInfo)
    models = _operation("List available models", ModelList, (InvalidApiKey,))
    _add_anthropics(models, ModelPage)
    health = _operation("Readiness, with workers", Health)
    health["responses"]["503"] = {"description": "Not ready; `missing` lists the reasons.", **_json(Health)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": importlib.metadata.version("baton")},
        "paths": {
            "/v1/chat/completions": {
                "post": _continued("Create a chat completion", ChatBody, ChatCompletion)
            },
            "/v1/completions": {"post": _continued("Create a raw completion", CompletionBody, Completion)},
            **_responses(),
            **_messages(),
            "/tokenize": {"post": tokens},
            "/detokenize": {"post": text},
            "/tokenizer_info": {"get": _operation("Get the tokenizer's settings", TokenizerInfo, _ASKING)},
            "/v1/models": {"get": models},
            "/v1/models/{model}": {"get": model, "parameters": [_parameter("path", "model")]},
            "/health": {"get": health},
            "/live": {"get": _operation("Liveness", None)},
            "/metrics": {"get": _operation("Prometheus metrics", None, media_type="text/plain")},
        },
        "components": {"schemas": _schemas(), "securitySchemes": _KEY_SCHEMES},
        "security": [{}, *({name: []} for name in _KEY_SCHEMES)],
    }


def _schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
    for schema in schemas.values():
        schema["description"] = " ".join(schema["description"].split())
    # `frontend.responses.input` validates items, after the body's types.
    items = [_item(kind, struct) for kind, struct in GIVEN_ITEMS.items()]
    either = [{"type": "string"}, {"type": "array", "items": {"anyOf": items}}, {"type": "null"}]
    schemas["ResponseBody"]["properties"]["input"] = {"anyOf": either, "default": None}
    return schemas


def _item(kind: str, struct: type[msgspec.Struct]) -> dict[str, Any]:
    tag = {"properties": {"type": {"const": kind}}, "required": [] if kind == "message" else ["type"]}
    return {"allOf": [_ref(struct), tag]}


def _responses() -> dict[str, Any]:
    by_id = {"parameters": [_parameter("path", "response_id")]}
    streamed = [
        _parameter("query", "stream", {"type": "boolean"}, "Return the response's events."),
        _parameter(
            "query",
            "starting_after",
            {"type": "integer", "minimum": 0, "maximum": 999_999_999},
            "Sequence number of the last event already received.",
        ),
    ]
    paged = [
        _parameter("query", "limit", {"type": "integer", "minimum": 1, "maximum": 100}, "Items per page."),
        _parameter("query", "order", {"enum": ["asc", "desc"]}, "Default: `desc`, latest first."),
        _parameter("query", "after", {"type": "string"}, "Id of the last item of the previous page."),
    ]
    created = _generation("Create a response", ResponseBody, ResponseObject, (PreviousNotFound, StoreFailure))
    retrieved = _operation("Get a stored or background response", ResponseObject, _STORED)
    _add_stream(retrieved)
    items = _operation("List a response's input items", ItemList, _STORED)
    return {
        "/v1/responses": {"post": created},
        "/v1/responses/input_tokens": {
            "post": _operation(
                "Count input tokens", InputTokens, (*_ASKING, PreviousNotFound), body=ResponseBody
            )
        },
        "/v1/responses/{response_id}": {
            "get": retrieved | {"parameters": streamed},
            "delete": _operation("Delete a response", DeletedResponse, _STORED),
            **by_id,
        },
        "/v1/responses/{response_id}/cancel": {
            "post": _operation("Cancel a background response", ResponseObject, _STORED),
            **by_id,
        },
        "/v1/responses/{response_id}/input_items": {"get": items | {"parameters": paged}, **by_id},
    }


def _messages() -> dict[str, Any]:
    created = _continued(
        "Create a message", MessagesBody, MessageObject, (ThreadNotFound,), envelope=MessagesError
    )
    counted = _operation("Count input tokens", TokenCount, _ASKING, body=Counted, envelope=MessagesError)
    return {"/v1/messages": {"post": created}, "/v1/messages/count_tokens": {"post": counted}}


def _generation(
    summary: str,
    body: type[msgspec.Struct],
    answer: type[msgspec.Struct],
    more: Errors = (),
    *,
    envelope: type[msgspec.Struct] = ErrorBody,
) -> dict[str, Any]:
    """An operation that can stream its answer."""
    operation = _operation(summary, answer, (*_GENERATING, *more), body=body, envelope=envelope)
    _add_stream(operation)
    return operation


def _continued(
    summary: str,
    body: type[msgspec.Struct],
    answer: type[msgspec.Struct],
    more: Errors = (),
    *,
    envelope: type[msgspec.Struct] = ErrorBody,
) -> dict[str, Any]:
    """A generation whose broken stream can be continued."""
    operation = _generation(summary, body, answer, (StreamChanged, *more), envelope=envelope)
    key = "Of this request only, and hard to guess. The events of a stream with one choice get ids."
    last = "With the same key and body: send the events after this one only."
    operation["parameters"] = [
        _parameter("header", "Idempotency-Key", {"type": "string", "maxLength": 255}, key),
        _parameter("header", "Last-Event-ID", None, last),
    ]
    return operation


def _add_stream(operation: dict[str, Any]) -> None:
    answered = operation["responses"]["200"]
    answered["description"] = (
        "The answer; if `stream` is true, server-sent events as the API defines them. An error after the "
        "first event is sent as the last event."
    )
    answered["content"]["text/event-stream"] = {}


def _add_anthropics(operation: dict[str, Any], answer: type[msgspec.Struct]) -> None:
    """Anthropic's shape, for requests with an `anthropic-version` header."""
    content = operation["responses"]["200"]["content"]["application/json"]
    content["schema"] = {"anyOf": [content["schema"], _ref(answer)]}


def _operation(
    summary: str,
    answer: type[msgspec.Struct] | None,
    errors: Errors = (),
    *,
    body: type[msgspec.Struct] | None = None,
    media_type: str = "application/json",
    envelope: type[msgspec.Struct] = ErrorBody,
) -> dict[str, Any]:
    content = {"content": {media_type: {}}} if answer is None else _json(answer)
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": summary, **content}, **_refusals(errors, envelope)},
    }
    if InvalidApiKey not in errors:
        operation["security"] = []
    if body is not None:
        operation["requestBody"] = {"required": True, **_json(body)}
        operation["requestBody"]["content"]["application/json"]["example"] = EXAMPLES[body]
        header = {"description": "Ignored fields of the request body.", "schema": {"type": "string"}}
        operation["responses"]["200"]["headers"] = {"x-baton-ignored": header}
    return operation


def _refusals(errors: Iterable[type[BatonError]], envelope: type[msgspec.Struct]) -> dict[str, Any]:
    """Error responses by status; the meaning of each code is its class's docstring."""
    refusals: dict[str, Any] = {}
    for error in sorted(errors, key=lambda error: error.status):
        refusal = refusals.setdefault(str(error.status), {"description": "", **_json(envelope)})
        meaning = "Internal server error." if error is BatonError else error.__doc__
        refusal["description"] += f"`{error.code}`: {meaning}\n\n"
        if error.status in _WITH_RETRY_AFTER:
            header = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
            refusal["headers"] = {"retry-after": header}
    return refusals


def _parameter(
    place: str, name: str, schema: dict[str, Any] | None = None, description: str = ""
) -> dict[str, Any]:
    parameter = {"name": name, "in": place, "schema": schema or {"type": "string"}}
    return parameter | ({"required": True} if place == "path" else {"description": description})


def _ref(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=struct.__name__)}


def _json(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": _ref(struct)}}}


_STYLE = "body{font:16px sans-serif;max-width:60em;margin:2em auto}pre{background:#eee;padding:1em}"


def reference_page(document: dict[str, Any]) -> str:
    """HTML of all operations: summary, example and body schema."""
    title = html.escape(document["info"]["title"])
    operations = "".join(_operations(document))
    return (
        f"<!doctype html><meta charset='utf-8'><title>{title}: API</title><style>{_STYLE}</style>"
        f"<h1>{title}: API</h1><p>OpenAPI document: <a href='openapi.json'>openapi.json</a></p>{operations}"
    )


def _operations(document: dict[str, Any]) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if method != "parameters":
                yield f"<h2>{method.upper()} {html.escape(path)}</h2>"
                yield f"<p>{html.escape(operation['summary'])}</p>"
                yield from _body(path, operation.get("requestBody"), schemas)


def _body(path: str, body: dict[str, Any] | None, schemas: dict[str, Any]) -> Iterator[str]:
    if body is None:
        return
    content = body["content"]["application/json"]
    example = html.escape(json.dumps(content["example"]))
    yield f"<pre>curl http://HOST:PORT{path} -H 'Content-Type: application/json' -d '{example}'</pre>"
    schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
    yield f"<p>{html.escape(schema['description'])}</p>"
    text = html.escape(json.dumps(schema, indent=2))
    yield f"<details><summary>Schema</summary><pre>{text}</pre></details>"
