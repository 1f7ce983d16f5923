"""The OpenAPI page: it shows what is really served, refused and answered."""

import asyncio
import json
import re
from typing import Any

import pytest

import frontend.__main__  # noqa: F401  defines every error that a frontend sends
from baton.errors import BatonError
from frontend.chat import ChatBody
from tests.scripted_frontend import MODEL, Client, ScriptedTokens

ANSWER = "<|channel|>final<|message|>Hello<|return|>"
PAGE: Any = asyncio.run(Client(ScriptedTokens("")).get("/openapi.json")).json


def test_the_real_schemas_are_shown() -> None:
    schemas = PAGE["components"]["schemas"]
    assert set(schemas["ChatBody"]["properties"]) >= set(ChatBody.__struct_encode_fields__)
    assert schemas["ChatBody"]["required"] == ["model", "messages"]


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


@pytest.mark.parametrize(
    "path", [path for path, served in PAGE["paths"].items() if "{" not in path and "post" in served]
)
def test_every_example_is_served(path: str) -> None:
    body = PAGE["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    reply = asyncio.run(Client(ScriptedTokens(ANSWER)).post(path, body | {"model": MODEL}))
    assert (reply.status, reply.headers.get("x-baton-ignored")) == (200, None), reply.json


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_pages_show_the_document_with_nothing_from_other_hosts(path: str) -> None:
    client = Client(ScriptedTokens(""))
    page = (await client.get(path)).body.decode()
    assert "/openapi.json" in page
    assets = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert any(each.endswith(".js") for each in assets)
    assert [(await client.get(each)).status for each in assets] == [200] * len(assets)
