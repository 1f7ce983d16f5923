"""Pages of other origins, and people and probes that open the frontend's address."""

import asyncio
from typing import Any

import pytest

from frontend.http.guards import Browsers
from tests.scripted_frontend import MODEL, Client, Reply, ScriptedTokens

ANSWER = "<|channel|>final<|message|>Hello<|return|>"
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PAGE = "https://app.example"


def client(*origins: str) -> Client:
    made = Client(ScriptedTokens(ANSWER))
    made.app = Browsers(made.app, origins)
    return made


def post(made: Client, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(made.post(CHAT, BODY, named))


def test_without_an_origin_nothing_changes() -> None:
    reply = post(client(), content_type="application/x-www-form-urlencoded")
    assert reply.status == 200
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_strange_page_cannot_make_the_server_work_blindly(content_type: str) -> None:
    made = client()
    reply = post(made, origin=PAGE, content_type=content_type)
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert not made.tokens.requests


def test_a_strange_page_cannot_read_an_answer() -> None:
    assert (
        "access-control-allow-origin"
        not in post(client(), origin=PAGE, content_type="application/json").headers
    )
    asked = asyncio.run(client().request("OPTIONS", CHAT, b"", {"origin": PAGE}))
    assert asked.status == 403
    seen = asyncio.run(client().request("GET", "/live", b"", {"origin": PAGE}))
    assert seen.status == 200
    assert "access-control-allow-origin" not in seen.headers
    json_with_charset = post(client(), origin=PAGE, content_type="application/json; charset=utf-8")
    assert json_with_charset.status == 200


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("origin", [PAGE + ".evil", "https://app", "null"])
async def test_a_page_is_allowed_by_its_whole_origin(origin: str, method: str) -> None:
    reply = await client(PAGE).request(method, "/v1/responses/x", b"", {"origin": origin})
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert reply.headers["connection"] == "close"  # its body is not read


@pytest.mark.parametrize("allowed", [PAGE, "*"])
def test_an_allowed_page_may_ask_and_read(allowed: str) -> None:
    made = client(allowed)
    asked = asyncio.run(
        made.request(
            "OPTIONS",
            CHAT,
            b"",
            {
                "origin": PAGE,
                "access-control-request-method": "POST",
                "access-control-request-headers": "content-type",
                "access-control-request-private-network": "true",  # as Chrome asks a server at home
            },
        )
    )
    assert asked.status == 200
    assert asked.headers["access-control-allow-headers"] == "content-type"
    assert asked.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    reply = post(made, origin=PAGE, content_type="application/json")
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, allowed)
    assert reply.headers["access-control-expose-headers"] == "*"
    if allowed == PAGE:
        # caches must not give it to others
        assert asked.headers["vary"].startswith("Origin")
        assert reply.headers["vary"] == "Origin"


def test_a_compressed_body_is_refused() -> None:
    reply = post(client(), content_encoding="gzip")
    assert (reply.status, reply.error["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize(
    "path", ["/docs", "/v1/models", f"/v1/models/{MODEL}", "/health", "/live", "/metrics", "/tokenizer_info"]
)
async def test_every_page_answers_head(path: str) -> None:
    made = Client(ScriptedTokens(ANSWER))
    for method in ("GET", "HEAD"):
        assert (await made.request(method, path, b"")).status == 200


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "Did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "Did you mean /v1/messages?"),
        ("/v1/metrics", "Did you mean /metrics?"),
        ("/v1/responses/compact", "`previous_response_id`"),
        ("/v1/conversations", "`previous_response_id`"),
        ("/v1/conversations/conv_1/items", "`previous_response_id`"),
        ("/v1/embeddings", "text only"),
        ("/embeddings", "text only"),
        ("/v1/batches", "at once"),
        ("/v1/files", "in the request"),
        ("/openai/deployments/m/chat/completions", "Azure"),
        ("/openai/v1/responses", "Azure"),
        ("/nope", None),
    ],
)
def test_a_path_that_is_not_served_gets_a_hint(path: str, hint: str | None) -> None:
    reply: Any = asyncio.run(Client(ScriptedTokens(ANSWER)).post(path, BODY))
    assert reply.status == 404
    assert (hint or "Not Found.") in reply.error["message"]


async def test_the_address_alone_leads_to_the_documentation() -> None:
    reply = await Client(ScriptedTokens(ANSWER)).get("/")
    assert (reply.status, reply.headers["location"]) == (307, "docs")
