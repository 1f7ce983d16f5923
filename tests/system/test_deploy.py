"""deploy/docker-compose.yml: its contents, and each service's own command line as a process."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.containers import DEPLOY, Container, Containers, serving
from tests.stack import ROOT
from tests.system.test_launch_commands import GUIDE_ENVIRONMENT
from tests.waiting import wait_for


def _services(**variables: str) -> dict[str, dict[str, Any]]:
    """The services with these variables: any other `${NAME:-default}` is its default."""
    text = (DEPLOY / "docker-compose.yml").read_text()
    plain = re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", lambda match: variables.get(match[1], match[2] or ""), text)
    services: dict[str, dict[str, Any]] = yaml.safe_load(plain)["services"]
    return services


SERVICES = _services()


def _containers(profile: str) -> dict[str, Container]:
    return {
        name: Container(
            shlex.split(service["command"]) if isinstance(service["command"], str) else service["command"],
            service.get("environment", {}),
            service["build"]["target"] if "build" in service else None,
        )
        for name, service in SERVICES.items()
        if profile in service.get("profiles", [profile])
    }


@pytest.fixture(scope="module")
def cpu_profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    with serving(tmp_path_factory.mktemp("cpu"), _containers("cpu")) as containers:
        yield containers


@pytest.fixture(scope="module")
def gpu_profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """With TensorRT-LLM's double, which serves the demo model."""
    with serving(tmp_path_factory.mktemp("gpu"), _containers("gpu")) as containers:
        yield containers


def _is_healthy(containers: Containers, name: str) -> bool:
    """Whether the service's own health check passes."""
    kind, *words = SERVICES[name]["healthcheck"]["test"]
    words = [word.replace("$$", "$") for word in words]
    return containers.succeeds(name, ["sh", "-c", *words] if kind == "CMD-SHELL" else words)


def test_a_frontend_without_workers_is_not_healthy(tmp_path: Path) -> None:
    containers = Containers(tmp_path, _containers("cpu"))
    try:
        for name in ("etcd", "nats", "frontend"):
            containers.start(name)
        wait_for(lambda: containers.answers("/live"))
        assert not _is_healthy(containers, "frontend")
    finally:
        containers.stop()


@pytest.mark.parametrize("profile", ["cpu_profile", pytest.param("gpu_profile", marks=pytest.mark.slow)])
def test_a_profile_answers_a_chat_request(profile: str, request: pytest.FixtureRequest) -> None:
    containers: Containers = request.getfixturevalue(profile)
    containers.check_chat()


def test_the_health_checks_hold_on_the_running_services(cpu_profile: Containers) -> None:
    for name in ("frontend", "prefill-cpu", "decode-cpu"):
        wait_for(lambda: _is_healthy(cpu_profile, name))  # noqa: B023  called at once
    assert httpx.get(f"{cpu_profile.url('8222')}/healthz").json() == {"status": "ok"}
    assert httpx.get(f"{cpu_profile.url('2379')}/health").json()["health"] == "true"
    assert httpx.get(f"{cpu_profile.url('8000')}/live").status_code == 200


def test_nats_runs_with_jetstream_and_15_mib_messages(cpu_profile: Containers) -> None:
    variables = httpx.get(f"{cpu_profile.url('8222')}/varz").json()
    assert variables["max_payload"] == 15_728_640
    assert variables["jetstream"]["config"]["store_dir"].endswith("/nats/jetstream")


def test_up_without_a_profile_is_etcd_and_nats_alone() -> None:
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {"etcd", "nats"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned_and_every_port_is_private(name: str) -> None:
    service = SERVICES[name]
    assert re.search(r":v?\d+\.\d+", service["image"]) or "build" in service
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_gpu_workers_have_the_limits_of_the_guide(name: str) -> None:
    service: Mapping[str, Any] = SERVICES[name]
    memlock, nofile = {"soft": -1, "hard": -1}, {"soft": 65_536, "hard": 65_536}
    assert service["ulimits"] == {"memlock": memlock, "stack": 67_108_864, "nofile": nofile}
    assert (service["ipc"], service["pid"], service["cap_add"]) == ("host", "host", ["SYS_PTRACE"])
    assert GUIDE_ENVIRONMENT.items() <= service["environment"].items()


def test_gpu_workers_share_no_gpu_and_read_configs_that_exist() -> None:
    services = [SERVICES[name] for name in ("prefill", "decode")]
    lists = [service["environment"]["CUDA_VISIBLE_DEVICES"].split(",") for service in services]
    assert not set(lists[0]) & set(lists[1])
    for service in services:
        words = shlex.split(service["command"])
        assert (ROOT / words[words.index("--extra-engine-args") + 1]).is_file()


def test_what_is_mounted_and_copied_exists() -> None:
    for service in SERVICES.values():
        sources = [volume.split(":")[0] for volume in service.get("volumes", [])]
        assert all((DEPLOY / source).exists() for source in sources if source.startswith("."))
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for line in copied for name in line.split())
    targets = {s["build"]["target"] for s in SERVICES.values() if "build" in s}
    assert targets == {"frontend", "worker", "demo"}


def test_every_process_gets_flags_variables_and_files() -> None:
    flags = {"FRONTEND_FLAGS": "--max-wait-s 0", "PREFILL_FLAGS": "--max-queue-size 9"}
    flags["DECODE_FLAGS"] = "--log-level debug"
    given = _services(REQUEST_TIMEOUT_S="900", BATON_FILES="/secrets", BATON_ENV_FILE="my.env", **flags)
    ends = {
        "frontend": "--request-timeout-s 900 --max-wait-s 0",
        **dict.fromkeys(("prefill", "prefill-cpu"), "--max-queue-size 9"),
        **dict.fromkeys(("decode", "decode-cpu"), "--log-level debug"),
    }
    for name, end in ends.items():
        assert given[name]["command"].strip().endswith(end)
        assert "/secrets:/etc/baton:ro" in given[name]["volumes"]
        assert given[name]["env_file"] == [{"path": "my.env", "required": False}]
        assert SERVICES[name]["command"].split()[-1][:2] != "--"


@pytest.mark.slow
def test_a_service_can_be_scaled(cpu_profile: Containers) -> None:
    """`--scale decode-cpu=2`; last, since the profile's other tests count its workers."""
    cpu_profile.start("decode-cpu")
    wait_for(lambda: cpu_profile.roles() == ["decode", "decode", "prefill"])
