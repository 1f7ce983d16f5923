"""NATS with TLS, clients' certificates and logins, from Dynamo's environment variables."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.connect import Wires
from baton.errors import BrokerLost
from operations.doctor.probes import probe_servers
from tests.certificates import Authority
from tests.conftest import LaunchServer, ServerProcess
from tests.planes import a_request, count_up, tokens
from tests.waiting import PATIENCE_S, scaled

SetUp = Callable[[LaunchServer, Path, pytest.MonkeyPatch], ServerProcess]


def certificates(launch: LaunchServer, folder: Path, patch: pytest.MonkeyPatch) -> ServerProcess:
    """The server wants clients' certificates."""
    authority = Authority(folder)
    cert, key = authority.sign("server")
    tls = ["--tlsverify", f"--tlscert={cert}", f"--tlskey={key}", f"--tlscacert={authority.ca}"]
    own = authority.sign("client")
    patch.setenv("NATS_AUTH_CA", str(authority.ca))
    patch.setenv("NATS_AUTH_CLIENT_CERT", str(own.cert))
    patch.setenv("NATS_AUTH_CLIENT_KEY", str(own.key))
    return launch(*tls)


def password(launch: LaunchServer, folder: Path, patch: pytest.MonkeyPatch) -> ServerProcess:
    patch.setenv("NATS_AUTH_USERNAME", "u")
    patch.setenv("NATS_AUTH_PASSWORD", "p:w")
    return launch("--user", "u", "--pass", "p:w")


def token(launch: LaunchServer, folder: Path, patch: pytest.MonkeyPatch) -> ServerProcess:
    patch.setenv("NATS_AUTH_TOKEN", "sesame")
    return launch("--auth", "sesame")


def over_the_url(launch: LaunchServer, folder: Path, patch: pytest.MonkeyPatch) -> ServerProcess:
    """The URL has another password."""
    server = password(launch, folder, patch)
    server.url = server.url.replace("//", "//u:wrong@")
    return server


def wires(server: ServerProcess) -> Wires:
    return Wires(request_plane="nats", nats_server=server.url)


@pytest.mark.parametrize("set_up", [certificates, password, token, over_the_url])
async def test_the_environments_login_is_used_also_when_the_server_returns(
    set_up: SetUp, launch_nats: LaunchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = set_up(launch_nats, tmp_path, monkeypatch)
    wires(server).check()
    worker, caller = wires(server).transport(), wires(server).transport()
    async with asyncio.timeout(PATIENCE_S), worker.serve("w", count_up) as address:
        assert await tokens(caller.call(address, a_request(2))) == [0, 1]
        server.kill()
        with pytest.raises(BrokerLost):
            await tokens(caller.call(address, a_request(2)))
        server.start()
        await caller.reachable()
        await worker.reachable()
        assert await tokens(caller.call(address, a_request(2))) == [0, 1]
    await caller.close()
    await worker.close()


@pytest.mark.parametrize(
    ("set_up", "wrong", "says"),
    [
        (certificates, {}, "certificate verify failed"),
        (password, {"NATS_AUTH_USERNAME": "u", "NATS_AUTH_PASSWORD": "hidden"}, "Authorization"),
        (token, {"NATS_AUTH_TOKEN": "hidden"}, "Authorization"),
        (token, {}, "Authorization"),
    ],
)
async def test_without_the_login_doctor_and_one_line_in_the_log_say_why_there_is_no_server(
    set_up: SetUp, wrong: dict[str, str], says: str, *, launch_nats: LaunchServer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with monkeypatch.context() as own:
        server = set_up(launch_nats, tmp_path, own)
        assert await probe_servers(wires(server)) == ()
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    (problem,) = await probe_servers(wires(server), scaled(4))
    assert says in problem
    assert caplog.text.count(says) == 1
    assert "hidden" not in caplog.text + problem


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_no_login_is_sent_without_tls_where_that_is_wanted(
    scheme: str, launch_nats: LaunchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = password(launch_nats, tmp_path, monkeypatch)
    server.url = server.url.replace("nats", scheme)
    if scheme == "nats":
        monkeypatch.setenv("NATS_AUTH_CA", str(Authority(tmp_path).ca))
    (problem,) = await probe_servers(wires(server), scaled(2))
    assert problem.endswith(": the server does not use TLS")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NATS_AUTH_USERNAME": "u"}, "NATS_AUTH_USERNAME and NATS_AUTH_PASSWORD: set both"),
        ({"NATS_AUTH_PASSWORD": "p"}, "NATS_AUTH_USERNAME and NATS_AUTH_PASSWORD: set both"),
        ({"NATS_AUTH_CA": "/none"}, "NATS_AUTH_CA: /none has no certificates in PEM: no such file"),
        ({"NATS_AUTH_CLIENT_CERT": "/x"}, "NATS_AUTH_CLIENT_CERT and NATS_AUTH_CLIENT_KEY: set both"),
        (
            {"NATS_AUTH_CLIENT_CERT": "/x", "NATS_AUTH_CLIENT_KEY": "/y"},
            "NATS_AUTH_CLIENT_CERT: needs NATS_AUTH_CA",
        ),
        ({"NATS_AUTH_NKEY": "SUAX"}, "NATS_AUTH_NKEY: not supported; use NATS_AUTH_USERNAME"),
        ({"NATS_AUTH_CREDENTIALS_FILE": "/x"}, "NATS_AUTH_CREDENTIALS_FILE: not supported"),
    ],
)
def test_what_is_missing_is_an_error_at_the_start(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        Wires(request_plane="nats").check()
    Wires(request_plane="tcp", discovery_backend="etcd").check()
