"""Requests with and without an API key, in each API's words."""

import asyncio
from typing import Any

import pytest

from frontend.app import ServerState, envelope_of, routes
from frontend.http.guards import OPEN_PATHS, Authentication, Browsers
from frontend.http.keys import Keys, line_of, parse_keys
from tests.scripted_frontend import MODEL, Client, Reply, ScriptedTokens

ANSWER = "<|channel|>final<|message|>Hello<|return|>"
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
PAGE = "https://app.example"
KEYS = parse_keys("\n".join(line_of(name, f"sk-{name}") for name in ("alice", "bob")))
ALICE = {"authorization": "Bearer sk-alice"}


def client(keys: Keys = KEYS) -> Client:
    made = Client(ScriptedTokens(ANSWER))
    made.app = Browsers(Authentication(made.app, lambda: keys, envelope_of, made.services.metrics), [PAGE])
    return made


def ask(method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"{}") -> Reply:
    return asyncio.run(client().request(method, path, body, headers))


@pytest.mark.parametrize("headers", [ALICE, {"x-api-key": "sk-bob"}])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_known_key_is_answered(path: str, headers: dict[str, str]) -> None:
    assert (await client().post(path, BODY, headers)).status == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer sk-mallory"}, {"x-api-key": "alice"}, {"authorization": "sk-alice"}],
)
def test_any_other_is_refused_in_the_words_of_the_api_asked(headers: dict[str, str]) -> None:
    made = client()
    openai, anthropic = (asyncio.run(made.post(path, BODY, headers)) for path in (CHAT, "/v1/messages"))
    assert openai.status == anthropic.status == 401
    assert openai.headers["www-authenticate"] == anthropic.headers["www-authenticate"] == "Bearer"
    assert (openai.error["code"], openai.error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert (anthropic.json["type"], anthropic.error["type"]) == ("error", "authentication_error")
    is_told_how = all(
        "authorization: bearer" in each.error["message"].lower() for each in (openai, anthropic)
    )
    assert is_told_how is (not headers or headers == {"authorization": "sk-alice"})
    assert made.tokens.requests == []
    assert made.metric("baton_requests_total", route="authentication", model="", status="401") == 2


EVERY_ROUTE = [*routes(ServerState()), ("GET", "/v1/models"), ("GET", "/v1/models/x"), ("GET", "/nope")]


@pytest.mark.parametrize(("method", "path"), EVERY_ROUTE)
def test_every_route_needs_a_key(method: str, path: str) -> None:
    for spelled in (path, f"{path}/", f"/{path}"):
        assert ask(method, spelled).status == 401


@pytest.mark.parametrize("path", [*sorted(OPEN_PATHS), "/docs/assets/swagger-ui.css"])
def test_pages_and_probes_do_not(path: str) -> None:
    assert ask("GET", path).status == (307 if path == "/" else 200)


async def test_a_refusal_does_not_read_the_body() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "query_string": b"", "client": None,
        "headers": [(b"content-length", b"1000000")],
    }  # fmt: skip
    await client().app(scope, receive, send)
    assert sent[0]["status"] == 401


async def test_a_refused_client_that_does_not_read_is_not_counted_for_ever() -> None:
    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(_: Any) -> None:
        raise asyncio.CancelledError  # the drain's time is over

    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
    made = client()
    with pytest.raises(asyncio.CancelledError):
        await made.app(scope, receive, send)
    assert made.metric("baton_running_requests", route="authentication") == 0


def test_an_allowed_page_asks_first_without_a_key_and_can_read_the_refusal() -> None:
    wants = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    asked = ask("OPTIONS", CHAT, wants)
    assert (asked.status, asked.headers["access-control-allow-headers"]) == (200, "authorization")
    refused = ask("POST", CHAT, {"origin": PAGE})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_a_key_that_is_taken_out_of_the_file_is_refused() -> None:
    made, keys = Client(ScriptedTokens(ANSWER)), [KEYS]
    made.app = Authentication(made.app, lambda: keys[0], envelope_of, made.services.metrics)
    assert asyncio.run(made.post(CHAT, BODY, ALICE)).status == 200
    keys[0] = parse_keys(line_of("bob", "sk-bob"))
    assert asyncio.run(made.post(CHAT, BODY, ALICE)).status == 401
