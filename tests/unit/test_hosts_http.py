"""Names under which the frontend is asked: addresses and its own are served, a strange page's are not."""

import asyncio

import pytest

from frontend.http.guards import Hosts
from tests.scripted_frontend import Client, Reply, ScriptedTokens


def asked(host: str | None, *names: str) -> Reply:
    client = Client(ScriptedTokens())
    client.app = Hosts(client.app, names)
    return asyncio.run(client.request("GET", "/v1/models", b"", {} if host is None else {"host": host}))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "[fd00::1]", "[::ffff:1.2.3.4]:80", "localhost",
        "LOCALHOST.:80", "app.localhost", "frontend:8000", "", None,
    ],
)  # fmt: skip
def test_an_address_or_a_name_that_no_one_can_register_is_served(host: str | None) -> None:
    assert asked(host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8000", "evil.example.", "localhost.evil.example", "1.2.3",
        "127.0.0.1.evil.example", "localhost@evil.example", "own.example.evil.example",
    ],
)  # fmt: skip
def test_a_strange_name_is_refused(host: str) -> None:
    reply = asked(host, "own.example", "*.example.com")
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["own.example", "Own.Example:8000", "a.b.example.com."])
def test_the_operators_names_are_served(host: str) -> None:
    assert asked(host, "OWN.example", "*.example.com").status == 200
    assert asked(host, "*").status == 200
