"""NATS with TLS, clients' certificates and logins, from Dynamo's environment variables."""

import asyncio
import base64
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import nkeys
import pytest

from baton.connect import Wires
from baton.errors import BrokerLost
from baton.nats import NatsTransport
from baton.nats_login import nats_options
from baton.tls import CredentialError
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


def nkey(launch: LaunchServer, folder: Path, patch: pytest.MonkeyPatch) -> ServerProcess:
    """The server has the public key."""
    user = Key(nkeys.PREFIX_BYTE_USER)
    patch.setenv("NATS_AUTH_NKEY", user.seed)
    config = folder / "nats.conf"
    config.write_text(f'authorization {{ users: [ {{ nkey: "{user.public}" }} ] }}')
    return launch("-c", str(config))


def jwt(launch: LaunchServer, folder: Path, patch: pytest.MonkeyPatch) -> ServerProcess:
    """The server has the operator, who signs accounts, which sign users."""
    operator, account, user = map(
        Key, (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER)
    )
    limits = dict.fromkeys(("subs", "data", "payload"), -1)
    whole = limits | dict.fromkeys(("conn", "leaf", "imports", "exports"), -1) | {"wildcards": True}
    own = operator.sign(operator, {"type": "operator"})
    signed = operator.sign(account, {"type": "account", "limits": whole})
    config = folder / "nats.conf"
    config.write_text(
        f'operator: {own}\nresolver: MEMORY\nresolver_preload: {{ {account.public}: "{signed}" }}\n'
    )
    file = folder / "user.creds"
    file.write_text(
        credentials(account.sign(user, {"type": "user", "pub": {}, "sub": {}, **limits}), user.seed)
    )
    patch.setenv("NATS_AUTH_CREDENTIALS_FILE", str(file))
    return launch("-c", str(config))


def credentials(jwt: str, seed: str) -> str:
    """The file that NATS's tool `nsc` writes."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


class Key:
    """A new key of a NATS operator, account or user."""

    def __init__(self, kind: int) -> None:
        raw: bytes = nkeys.encode_seed(os.urandom(32), kind)
        self.seed = raw.decode()
        self._pair = nkeys.from_seed(bytearray(raw))
        self.public: str = self._pair.public_key.decode()

    def sign(self, subject: "Key", claims: dict[str, object]) -> str:
        """The subject's JWT."""
        head = {"jti": "1", "iat": 1, "iss": self.public, "name": "n", "sub": subject.public}
        parts = ({"typ": "JWT", "alg": "ed25519-nkey"}, head | {"nats": claims | {"version": 2}})
        text = ".".join(_base64(msgspec.json.encode(part)) for part in parts)
        return f"{text}.{_base64(self._pair.sign(text.encode()))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def over_the_url(launch: LaunchServer, folder: Path, patch: pytest.MonkeyPatch) -> ServerProcess:
    """The URL has another password."""
    server = password(launch, folder, patch)
    server.url = server.url.replace("//", "//u:wrong@")
    return server


def wires(server: ServerProcess) -> Wires:
    return Wires(request_plane="nats", nats_server=server.url)


@pytest.mark.parametrize(
    ("set_up", "emptied"),
    [
        *((each, None) for each in (certificates, password, token, nkey, jwt, over_the_url)),
        (jwt, "user.creds"),
    ],
)
async def test_the_environments_login_is_used_also_when_the_server_returns(
    set_up: SetUp,
    emptied: str | None,
    launch_nats: LaunchServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while the file with the login is `emptied`."""
    server = set_up(launch_nats, tmp_path, monkeypatch)
    wires(server).check()
    worker, caller = wires(server).transport(), wires(server).transport()
    async with asyncio.timeout(PATIENCE_S), worker.serve("w", count_up) as address:
        assert await tokens(caller.call(address, a_request(2))) == [0, 1]
        server.kill()
        if emptied is not None:
            (tmp_path / emptied).write_text("")
        with pytest.raises(BrokerLost):
            await tokens(caller.call(address, a_request(2)))
        server.start()
        await caller.reachable()
        await worker.reachable()
        assert await tokens(caller.call(address, a_request(2))) == [0, 1]
    await caller.close()
    await worker.close()


@pytest.mark.parametrize("set_up", [certificates, password, token, nkey, jwt])
async def test_without_the_login_there_is_no_server(
    set_up: SetUp, launch_nats: LaunchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as own:
        server = set_up(launch_nats, tmp_path, own)
    monkeypatch.setattr("baton.nats.CONNECT_TIMEOUT_S", scaled(0.5))
    foreign = wires(server).transport()
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(PATIENCE_S), foreign.serve("w", count_up):
            pass
    await foreign.close()


async def test_a_refused_login_is_logged_once(
    launch_nats: LaunchServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = launch_nats("--user", "u", "--pass", "sesame")
    transport = NatsTransport(server.url, user="u", password="wrong")
    for _ in range(3):
        with pytest.raises(ConnectionError, match="no NATS server at"):
            async with transport.serve("w", count_up):
                pass
    await transport.close()
    assert caplog.text.count("Authorization Violation") == 1
    assert "wrong" not in caplog.text
    server.kill()


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
        ({"NATS_AUTH_NKEY": "SUAX"}, "NATS_AUTH_NKEY: the seed is not that of a NATS user, SU...$"),
        (
            {"NATS_AUTH_NKEY": Key(nkeys.PREFIX_BYTE_ACCOUNT).seed},
            "NATS_AUTH_NKEY: the seed is not that of a NATS user",
        ),
        (
            {"NATS_AUTH_NKEY": "SU", "NATS_AUTH_CREDENTIALS_FILE": "/x"},
            "NATS_AUTH_NKEY and NATS_AUTH_CREDENTIALS_FILE: set one of them",
        ),
        (
            {"NATS_AUTH_CREDENTIALS_FILE": "/none"},
            "NATS_AUTH_CREDENTIALS_FILE: /none cannot be read: .*No such file",
        ),
    ],
)
def test_what_is_missing_is_an_error_at_the_start(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CredentialError, match=message):
        Wires(request_plane="nats").check()
    Wires(request_plane="tcp", discovery_backend="etcd").check()


def test_without_the_package_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_AUTH_NKEY", Key(nkeys.PREFIX_BYTE_USER).seed)
    monkeypatch.setitem(sys.modules, "nkeys", None)
    with pytest.raises(CredentialError, match="NATS_AUTH_NKEY: needs the package nkeys: pip install nkeys"):
        nats_options()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no part BEGIN NATS USER JWT"),
        (credentials("jwt", "").replace("USER NKEY", "NO"), "has no part BEGIN USER NKEY SEED"),
        (credentials("jwt", "SUxyz"), "the seed is not that of a NATS user"),
    ],
)
def test_an_incomplete_credentials_file_is_an_error(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "user.creds"
    file.write_text(text)
    monkeypatch.setenv("NATS_AUTH_CREDENTIALS_FILE", str(file))
    with pytest.raises(CredentialError, match=message):
        nats_options()
