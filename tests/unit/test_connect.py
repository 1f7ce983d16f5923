"""What the flags and the environment make of the registry and the request plane."""

import pytest

from baton.connect import Wires, nats_options
from baton.flags import parse, read
from baton.pace import TICK_S


@pytest.mark.parametrize(
    ("environ", "flags", "chosen"),
    [
        ({}, [], ("file", "tcp")),
        ({"ETCD_ENDPOINTS": "", "NATS_SERVER": ""}, [], ("file", "tcp")),
        ({"ETCD_ENDPOINTS": "http://e:1"}, [], ("etcd", "tcp")),
        ({"NATS_SERVER": "nats://n:1"}, [], ("file", "nats")),
        ({}, ["--etcd-endpoints=http://e:1", "--nats-server=n:1"], ("etcd", "nats")),
        (
            {"ETCD_ENDPOINTS": "e:1", "NATS_SERVER": "nats://n:99999"},
            ["--discovery-backend=file", "--request-plane=tcp"],
            ("file", "tcp"),
        ),
        ({}, ["--discovery-backend=etcd", "--request-plane=nats"], ("etcd", "nats")),
    ],
)
def test_a_flag_chooses_the_registry_and_the_plane_else_the_environment(
    environ: dict[str, str], flags: list[str], chosen: tuple[str, str]
) -> None:
    wires = parse(Wires, flags, prog="p", description="d", environ=environ).settings
    assert (wires.registry, wires.plane) == chosen


def test_names_have_no_secrets() -> None:
    wires = Wires(
        discovery_backend="etcd",
        etcd_endpoints="http://root:secret@e:1",
        request_plane="nats",
        nats_server="nats://root:secret@n:1",
    )
    assert "secret" not in wires.registry_name() + wires.plane_name()


def test_the_shortest_liveness_limit_is_four_heartbeats() -> None:
    assert read(Wires, [f"--liveness-s={4 * TICK_S}"]).settings.liveness_s == 4 * TICK_S
    with pytest.raises(ValueError, match=r"--liveness-s 0\.99: must be at least 1"):
        read(Wires, [f"--liveness-s={4 * TICK_S - 0.01}"])


def test_empty_variables_are_no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AUTH_USERNAME", "AUTH_PASSWORD", "AUTH_TOKEN", "AUTH_CA", "AUTH_CLIENT_CERT"):
        monkeypatch.setenv(f"NATS_{name}", "")
    assert nats_options() == {}
