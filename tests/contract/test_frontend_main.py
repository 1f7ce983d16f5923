"""`python -m frontend` from arguments to exit status: which socket it listens on, and taking one over."""

import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from frontend.__main__ import _port, main
from frontend.flags import FrontendSettings


@pytest.mark.parametrize(
    "settings",
    [
        {"insecure": True},
        {"api_keys_file": Path("keys")},
        {"tls_cert_file": Path("c"), "tls_key_file": Path("k"), "tls_client_ca_file": Path("a")},
    ],
    ids=["insecure", "keys", "client certificates"],
)
def test_other_machines_are_served_if_their_clients_are_known_or_it_is_said_to_be_insecure(
    settings: dict[str, Any],
) -> None:
    with closing(_port(FrontendSettings(http_host="0.0.0.0", http_port=0, **settings))) as port:
        assert port.listener.getsockname()[0] == "0.0.0.0"
        assert port.listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_https_alone_does_not_tell_who_a_client_is() -> None:
    tls: dict[str, Any] = {"tls_cert_file": Path("c"), "tls_key_file": Path("k")}
    with pytest.raises(ValueError, match="there are no API keys"):
        _port(FrontendSettings(http_host="0.0.0.0", http_port=0, **tls))


def test_this_machine_is_served_over_either_internet_protocol() -> None:
    for host in ("127.0.0.1", "::1"):
        with closing(_port(FrontendSettings(http_host=host, http_port=0))) as port:
            assert port.listener.getsockname()[0] == host


@pytest.mark.parametrize("take_over", [False, True], ids=["", "taken over"])
def test_a_port_that_another_program_uses_is_refused_by_its_flag(take_over: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        number = theirs.getsockname()[1]
        with pytest.raises(ValueError, match=f"on 127.0.0.1:{number}: .*choose another --http-port"):
            _port(FrontendSettings(http_port=number, take_over=take_over))


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_refused_by_its_flag(host: str) -> None:
    with pytest.raises(ValueError, match=f"cannot listen on {host}:0: .*; choose another --http-host"):
        _port(FrontendSettings(http_host=host, http_port=0))


def test_a_registry_that_others_can_write_to_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o777)
    assert main(["--http-port", "0", f"--file-registry={tmp_path}"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
