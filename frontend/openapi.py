"""The OpenAPI page: the routes, with the schemas of the structs that really validate and answer."""

from typing import Any

import msgspec

from frontend.answers import ChatCompletion, Completion, ErrorBody, ModelBody, ModelList
from frontend.fleet import Health
from frontend.schema import ChatBody, CompletionBody

_REF = "#/components/schemas/{name}"
_STRUCTS = (ChatBody, CompletionBody, ChatCompletion, Completion, ModelBody, ModelList, ErrorBody, Health)
_MODEL_PARAMETER = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}


def page(title: str, version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    _, components = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": {
            "/v1/chat/completions": {"post": _generation("Chat completion", ChatBody, ChatCompletion)},
            "/v1/completions": {"post": _generation("Raw completion", CompletionBody, Completion)},
            "/v1/models": {"get": _reading("Models that can be asked for", ModelList)},
            "/v1/models/{model}": {
                "get": _reading("One model", ModelBody) | {"parameters": [_MODEL_PARAMETER]}
            },
            "/health": {
                "get": _reading("Whether a request could be served", Health, unhealthy=_json(Health))
            },
            "/live": {"get": _reading("Whether this process runs", None)},
            "/metrics": {"get": _reading("Prometheus metrics", None)},
        },
        "components": {"schemas": components},
    }


def _generation(summary: str, body: type[msgspec.Struct], answer: type[msgspec.Struct]) -> dict[str, Any]:
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, **_json(body)},
        "responses": {
            "200": {
                "description": "The answer; events if `stream` is true.",
                "content": _json(answer)["content"] | events,
            },
            "default": {"description": "Why there is none.", **_json(ErrorBody)},
        },
    }


def _reading(
    summary: str, answer: type[msgspec.Struct] | None, unhealthy: dict[str, Any] | None = None
) -> dict[str, Any]:
    responses = {"200": {"description": summary, **({} if answer is None else _json(answer))}}
    if unhealthy is not None:
        responses["503"] = {"description": "What is missing.", **unhealthy}
    return {"summary": summary, "responses": responses}


def _json(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": _REF.format(name=struct.__name__)}}}}
