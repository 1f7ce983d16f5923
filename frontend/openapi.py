"""What the OpenAPI document says: a table of operations, the schemas of their structs, and all errors."""

import functools
import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from baton.errors import BatonError
from frontend.chat.answer import ChatCompletion
from frontend.chat.request import ChatBody
from frontend.completions.answer import Completion, CompletionBody
from frontend.http.exchange import ErrorBody
from frontend.http.guards import OPEN_PATHS
from frontend.messages.answer import MessageObject, MessagesError, TokenCount
from frontend.messages.request import Counted, MessagesBody
from frontend.pages import ModelBody, ModelInfo, ModelList, ModelPage
from frontend.responses.body import DeletedResponse, InputTokens, ItemList, ResponseBody, ResponseObject
from frontend.responses.items import INPUT_ITEMS
from frontend.routing.health import Health
from frontend.tokenization import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerInfo,
)

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
