"""The OpenAPI page: it shows what is really served, refused and answered."""

import asyncio
import json
import re
from typing import Any

import pytest

import frontend.__main__  # noqa: F401  defines every error that a frontend sends
from baton.errors import BatonError
from frontend.app import routes
from frontend.chat.request import ChatBody
from frontend.responses.runs import ResponseState
from tests.scripted_frontend import MODEL, Client, ScriptedTokens

ROUTES = routes(ResponseState())
ANSWER = "<|channel|>final<|message|>Hello<|return|>"
PAGE: Any = asyncio.run(Client(ScriptedTokens("")).get("/openapi.json")).json

METHODS = {"get", "post", "delete"}


def test_the_real_schemas_are_shown() -> None:
    schemas = PAGE["components"]["schemas"]
    assert set(schemas["ChatBody"]["properties"]) >= set(ChatBody.__struct_encode_fields__)
    assert schemas["ChatBody"]["required"] == ["model", "messages"]


def test_every_route_is_shown() -> None:
    shown = {(method.upper(), path) for path, methods in PAGE["paths"].items() for method in methods}
    assert shown >= ROUTES.keys()


def test_answers_that_can_be_streamed_say_so() -> None:
    streamed = {
        (method, path)
        for path, operations in PAGE["paths"].items()
        for method, operation in operations.items()
        if "text/event-stream" in operation["responses"]["200"].get("content", {})
    }
    assert streamed == {
        ("post", "/v1/chat/completions"),
        ("post", "/v1/completions"),
        ("post", "/v1/responses"),
        ("get", "/v1/responses/{response_id}"),
        ("post", "/v1/messages"),
    }


def test_every_error_is_shown() -> None:
    def codes(kind: type[BatonError]) -> set[str]:
        own = {kind.code} if kind.__module__.startswith(("baton.", "frontend.")) else set()
        return own.union(*map(codes, kind.__subclasses__()))

    rows = re.findall(r"^\| \d+ \| `(\w+)`", PAGE["info"]["description"], re.MULTILINE)
    assert set(rows) >= codes(BatonError)
    assert len(rows) == len(set(rows))


def test_every_reference_leads_somewhere() -> None:
    names = {part.split('"')[0] for part in json.dumps(PAGE).split("#/components/schemas/")[1:]}
    assert names <= PAGE["components"]["schemas"].keys()


@pytest.mark.parametrize("path", [path for (method, path) in ROUTES if method == "POST" and "{" not in path])
def test_every_example_is_served(path: str) -> None:
    body = PAGE["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    reply = asyncio.run(Client(ScriptedTokens(ANSWER)).post(path, body | {"model": MODEL}))
    assert (reply.status, reply.headers.get("x-baton-ignored")) == (200, None), reply.json


def test_every_parameter_of_a_path_is_required_and_the_others_say_what_they_are_for() -> None:
    for path, operations in PAGE["paths"].items():
        for operation in operations.values():
            given = operation.get("parameters", [])
            in_path = [each for each in given if each["in"] == "path"]
            assert [f"{{{each['name']}}}" for each in in_path] == re.findall(r"{\w+}", path)
            assert all(each["required"] for each in in_path)
            assert all(each["description"] for each in given if each not in in_path)


def test_what_is_served_without_a_key_says_so() -> None:
    free = {
        path
        for path, operations in PAGE["paths"].items()
        for method in METHODS & set(operations)
        if operations[method].get("security") == []
    }
    assert free == {"/health", "/live", "/metrics"}


def test_each_path_refuses_as_its_api_does() -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
        shown = PAGE["paths"][path]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
        assert shown["$ref"].endswith("/MessagesError") == path.startswith("/v1/messages")


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_pages_show_the_document_with_nothing_from_other_hosts(path: str) -> None:
    client = Client(ScriptedTokens(""))
    page = (await client.get(path)).body.decode()
    assert "/openapi.json" in page
    assets = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert any(each.endswith(".js") for each in assets)
    assert [(await client.get(each)).status for each in assets] == [200] * len(assets)
