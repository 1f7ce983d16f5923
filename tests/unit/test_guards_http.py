"""Who is served: API keys, pages of other origins, names of the server, paths that are not served."""

from typing import Any

import pytest

from frontend.app import operations
from frontend.http.guards import OPEN_PATHS, Guards
from frontend.http.keys import line_of, parse_keys
from frontend.responses.runs import ResponseState
from tests.scripted_frontend import MODEL, Client, ScriptedTokens

ANSWER = "<|channel|>final<|message|>Hello<|return|>"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
PAGE = "https://app.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST"}
JSON, FORM = "application/json", "application/x-www-form-urlencoded"


def open_to(*origins: str) -> Client:
    """A frontend that pages of these origins may use."""
    made = Client(ScriptedTokens(ANSWER))
    made.app = Guards(made.app, made.services.metrics, origins=origins)
    return made


def keyed(*names: str) -> Client:
    """A frontend for these API keys, and one page."""
    made = Client(ScriptedTokens(ANSWER))
    keys = parse_keys("\n".join(line_of(name, f"sk-{name}", is_admin=name == "root") for name in names))
    made.app = Guards(made.app, made.services.metrics, keys=lambda: keys, origins=[PAGE])
    return made


@pytest.mark.parametrize(
    ("headers", "is_key"),
    [
        ({}, False),
        ({"authorization": "sk-alice"}, False),
        ({"authorization": "Bearer sk-mallory"}, True),
        ({"x-api-key": "alice"}, True),
    ],
)
async def test_any_other_is_refused_in_the_format_of_the_api(headers: dict[str, str], is_key: bool) -> None:
    made = keyed("alice")
    openai, anthropic = [await made.post(path, BODY, headers) for path in (CHAT, MESSAGES)]
    assert (openai.error["code"], openai.error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert (anthropic.json["type"], anthropic.error["type"]) == ("error", "authentication_error")
    for reply in (openai, anthropic):
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert ("`Authorization: Bearer KEY`" in reply.error["message"]) is not is_key
    assert made.tokens.requests == []
    assert made.metric("baton_requests_total", route="authentication", model="", status="401") == 2


CLOSED = {key for key in operations(ResponseState()) if key[1] not in OPEN_PATHS} | {("GET", "/nope")}


@pytest.mark.parametrize(("method", "path"), sorted(CLOSED))
async def test_every_route_needs_a_key(method: str, path: str) -> None:
    for spelled in (path, f"{path}/", f"/{path}"):
        assert (await keyed("alice").request(method, spelled, b"{}")).status == 401


@pytest.mark.parametrize("path", [*sorted(OPEN_PATHS), "/docs/assets/swagger-ui.css", "/page/page.js"])
async def test_pages_and_probes_need_none(path: str) -> None:
    assert (await keyed("alice").get(path)).status == 200


async def test_a_refusal_neither_reads_the_body_nor_counts_for_ever_if_it_is_not_read() -> None:
    made, statuses = keyed("alice"), []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        statuses.append(message["status"])
        raise TimeoutError

    headers = [(b"content-length", b"1000000")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
    with pytest.raises(TimeoutError):
        await made.app(scope, receive, send)
    assert statuses == [401]
    assert made.metric("baton_running_requests", route="authentication") == 0


async def test_an_allowed_page_needs_no_key_for_its_preflight_and_can_read_the_refusal() -> None:
    preflight = PREFLIGHT | {"access-control-request-headers": "authorization"}
    reply = await keyed("alice").request("OPTIONS", CHAT, b"", preflight)
    assert (reply.status, reply.headers["access-control-allow-headers"]) == (200, "authorization")
    refused = await keyed("alice").post(CHAT, BODY, {"origin": PAGE})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": FORM}, 200),
        ({"origin": PAGE, "content-type": JSON}, 200),
        ({"origin": PAGE, "content-type": f"{JSON}; charset=utf-8"}, 200),
        ({"origin": PAGE, "content-type": "text/plain"}, 403),
        ({"origin": PAGE, "content-type": FORM}, 403),
        ({"origin": PAGE}, 403),
    ],
)
async def test_a_page_of_another_origin_can_neither_send_forms_nor_read_answers(
    headers: dict[str, str], status: int
) -> None:
    made = open_to()
    reply = await made.post(CHAT, BODY, headers)
    assert reply.status == status
    assert "access-control-allow-origin" not in reply.headers
    assert len(made.tokens.requests) == (status == 200)
    if status == 403:
        assert reply.error["code"] == "origin_not_allowed"
    assert (await open_to().request("OPTIONS", CHAT, b"", {"origin": PAGE})).status == 403
    live = await open_to().request("GET", "/live", b"", {"origin": PAGE})
    assert (live.status, live.headers.get("access-control-allow-origin")) == (200, None)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("origin", [PAGE + ".evil", "https://app", "null"])
async def test_a_page_is_allowed_by_its_whole_origin(origin: str, method: str) -> None:
    reply = await open_to(PAGE).request(method, "/v1/responses/x", b"", {"origin": origin})
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert reply.headers["connection"] == "close"  # its body is not read
    of_messages = await open_to(PAGE).request(method, "/v1/messages", b"", {"origin": origin})
    assert of_messages.json["error"]["type"] == "permission_error"


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_an_allowed_page_may_send_and_read(allowed: str) -> None:
    # As Chrome sends to a server at home.
    preflight = {
        "access-control-request-headers": "content-type",
        "access-control-request-private-network": "true",
    }
    found = await open_to(allowed).request("OPTIONS", CHAT, b"", PREFLIGHT | preflight)
    assert found.status == 200
    assert found.headers["access-control-allow-headers"] == "content-type"
    assert found.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    reply = await open_to(allowed).post(CHAT, BODY, {"origin": PAGE, "content-type": JSON})
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, allowed)
    assert reply.headers["access-control-expose-headers"] == "*"
    if allowed == PAGE:  # caches must not give it to others
        assert found.headers["vary"].startswith("Origin")
        assert reply.headers["vary"] == "Origin"


OWN = ("OWN.example", "*.example.com")


@pytest.mark.parametrize(
    ("names", "status", "hosts"),
    [
        (
            (), 200,
            ["127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "[fd00::1]", "[::ffff:1.2.3.4]:80", "localhost",
             "LOCALHOST.:80", "app.localhost", "frontend:8000", "10.1.2.3.", "[fe80::1%eth0.7]:80", "", None],
        ),
        (
            OWN, 403,
            ["evil.example", "evil.example:8000", "evil.example.", "localhost.evil.example", "1.2.3.x",
             "127.0.0.1.evil.example", "localhost@evil.example", "own.example.evil.example"],
        ),
        (OWN, 200, ["own.example", "Own.Example:8000", "a.b.example.com."]),
        (("*",), 200, ["own.example", "evil.example"]),
    ],
    ids=["unregistrable", "others", "the operator's", "any"],
)  # fmt: skip
async def test_a_server_is_known_by_its_addresses_and_the_operators_names(
    names: tuple[str, ...], status: int, hosts: list[str | None]
) -> None:
    client = Client(ScriptedTokens())
    client.app = Guards(client.app, client.services.metrics, names=names)
    for host in hosts:
        reply = await client.request("GET", "/v1/models", b"", {} if host is None else {"host": host})
        assert reply.status == status, host
        assert status == 200 or reply.error["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "Did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "Did you mean /v1/messages?"),
        ("/v1/metrics", "Did you mean /metrics?"),
        ("/nope", "/docs lists what is served."),
    ],
)
async def test_a_path_that_is_not_served_gets_a_hint(path: str, hint: str) -> None:
    reply = await Client(ScriptedTokens(ANSWER)).post(path, BODY)
    assert reply.status == 404
    assert hint in reply.error["message"]
