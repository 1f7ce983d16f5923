"""The OpenAPI page: the routes, with the schemas of the structs that really validate and answer."""

from typing import Any

import msgspec

from frontend.answers import ChatCompletion, Completion, ErrorBody, ModelBody, ModelList
from frontend.fleet import Health
from frontend.response_object import DeletedResponse, ItemList, ResponseObject
from frontend.response_schema import ResponseBody
from frontend.schema import ChatBody, CompletionBody
from frontend.tokenization import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody

_REF = "#/components/schemas/{name}"
_STRUCTS = (
    ChatBody, CompletionBody, ChatCompletion, Completion, ModelBody, ModelList, ErrorBody, Health,
    ResponseBody, ResponseObject, ItemList, DeletedResponse,
    TokenizeBody, TokenizeAnswer, DetokenizeBody, DetokenizeAnswer,
)  # fmt: skip
_MODEL_PARAMETER = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
_RESPONSE_ID = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}


def page(title: str, version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    _, components = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": {
            "/v1/chat/completions": {"post": _generation("Chat completion", ChatBody, ChatCompletion)},
            "/v1/completions": {"post": _generation("Raw completion", CompletionBody, Completion)},
            **_responses(),
            "/tokenize": {"post": _post("Token ids of a prompt", TokenizeBody, TokenizeAnswer)},
            "/detokenize": {"post": _post("Text of token ids", DetokenizeBody, DetokenizeAnswer)},
            "/v1/models": {"get": _reading("Models that can be asked for", ModelList)},
            "/v1/models/{model}": {
                "get": _post("One model", None, ModelBody) | {"parameters": [_MODEL_PARAMETER]}
            },
            "/health": {
                "get": _reading("Whether a request could be served", Health, unhealthy=_json(Health))
            },
            "/live": {"get": _reading("Whether this process runs", None)},
            "/metrics": {"get": _reading("Prometheus metrics", None)},
        },
        "components": {"schemas": components},
    }


def _responses() -> dict[str, Any]:
    by_id = {"parameters": [_RESPONSE_ID]}
    streamed = [
        _query("stream", {"type": "boolean"}, "events instead of the response"),
        _query("starting_after", {"type": "integer", "minimum": 0}, "number of the last event already seen"),
    ]
    paged = [
        _query("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "items of a page"),
        _query("order", {"enum": ["asc", "desc"]}, "`desc`, the default: latest first"),
        _query("after", {"type": "string"}, "id of the last item of the page before"),
    ]
    retrieved = _generation("A stored response, or one in the background", None, ResponseObject)
    return {
        "/v1/responses": {"post": _generation("Response", ResponseBody, ResponseObject)},
        "/v1/responses/{response_id}": {
            "get": retrieved | {"parameters": streamed},
            "delete": _post("Forget a response", None, DeletedResponse),
            **by_id,
        },
        "/v1/responses/{response_id}/cancel": {
            "post": _post("End a background response", None, ResponseObject),
            **by_id,
        },
        "/v1/responses/{response_id}/input_items": {
            "get": _post("What a response was made from", None, ItemList) | {"parameters": paged},
            **by_id,
        },
    }


def _query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _post(summary: str, body: type[msgspec.Struct] | None, answer: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        "summary": summary,
        **({} if body is None else {"requestBody": {"required": True, **_json(body)}}),
        "responses": {
            "200": {"description": summary, **_json(answer)},
            "default": {"description": "Why there is none.", **_json(ErrorBody)},
        },
    }


def _generation(
    summary: str, body: type[msgspec.Struct] | None, answer: type[msgspec.Struct]
) -> dict[str, Any]:
    """A route that can stream its answer."""
    route = _post(summary, body, answer)
    answered = route["responses"]["200"]
    answered["description"] = "The answer; events if `stream` is true."
    answered["content"]["text/event-stream"] = {}
    return route


def _reading(
    summary: str, answer: type[msgspec.Struct] | None, unhealthy: dict[str, Any] | None = None
) -> dict[str, Any]:
    responses = {"200": {"description": summary, **({} if answer is None else _json(answer))}}
    if unhealthy is not None:
        responses["503"] = {"description": "What is missing.", **unhealthy}
    return {"summary": summary, "responses": responses}


def _json(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": _REF.format(name=struct.__name__)}}}}
