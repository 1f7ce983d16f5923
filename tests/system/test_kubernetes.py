"""deploy/kubernetes: what refers to what, and each container's command line and probes with processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers import DEPLOY, Container, Containers, serving
from tests.waiting import wait_for

FOLDER = DEPLOY / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS = {
    (found["kind"], found["metadata"]["name"]): found
    for file in KUSTOMIZATION["resources"]
    for found in yaml.safe_load_all((FOLDER / file).read_text())
}
PODS = {
    name: found["spec"]["template"]["spec"] for (kind, name), found in OBJECTS.items() if kind == "Deployment"
}
SETTINGS = {
    generated["name"]: dict(line.split("=", 1) for line in generated["literals"])
    for generated in KUSTOMIZATION["configMapGenerator"]
}
COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
WORKERS = ("baton-prefill", "baton-decode")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def _only_container(name: str) -> dict[str, Any]:
    (container,) = PODS[name]["containers"]
    found: dict[str, Any] = container
    return found


FIELDS = {"status.podIP": "127.0.0.1", "metadata.name": "baton-worker-5d8f-x7k2p"}


def _environ(name: str) -> dict[str, str]:
    container = _only_container(name)
    environ: dict[str, str] = {}
    for source in container["envFrom"]:
        environ |= SETTINGS[source["configMapRef"]["name"]]
    for variable in container["env"]:
        value = variable.get("value")
        environ[variable["name"]] = value or FIELDS[variable["valueFrom"]["fieldRef"]["fieldPath"]]
    return environ


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """With compose's etcd and NATS, and TensorRT-LLM's double with the demo model."""
    known = {name: Container(COMPOSE["services"][name]["command"]) for name in ("etcd", "nats")}
    for name in PODS:
        container = _only_container(name)
        stage = container["image"].removeprefix("baton-")
        known[name] = Container(container["command"], _environ(name), stage)
    with serving(tmp_path_factory.mktemp("pods"), known) as containers:
        yield containers


@pytest.mark.slow
def test_the_containers_serve_and_their_probes_pass(pods: Containers) -> None:
    pods.check_chat()
    for name in PODS:
        for probe in PROBES:
            wait_for(lambda: _passes(pods, name, probe))  # noqa: B023  called at once


def _passes(pods: Containers, name: str, probe: str) -> bool:
    check = _only_container(name)[probe]
    if "httpGet" in check:
        assert check["httpGet"]["port"] == "http"
        return pods.answers(check["httpGet"]["path"])
    return pods.succeeds(name, check["exec"]["command"])


def test_a_frontend_without_workers_is_live_and_not_ready(tmp_path: Path) -> None:
    container = _only_container("baton-frontend")
    environ = _environ("baton-frontend") | {"BATON_DISCOVERY_BACKEND": "file", "BATON_REQUEST_PLANE": "tcp"}
    environ["BATON_FILE_REGISTRY"] = "/tmp/registry"
    pods = Containers(tmp_path, {"baton-frontend": Container(container["command"], environ, "frontend")})
    try:
        pods.start("baton-frontend")
        wait_for(lambda: _passes(pods, "baton-frontend", "startupProbe"))
        assert _passes(pods, "baton-frontend", "livenessProbe")
        assert not _passes(pods, "baton-frontend", "readinessProbe")
    finally:
        pods.stop()


@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_confined_and_may_drain(name: str) -> None:
    pod, container = PODS[name], _only_container(name)
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    drain = COMPOSE["services"][name.removeprefix("baton-")]["stop_grace_period"]
    assert pod["terminationGracePeriodSeconds"] >= int(drain.removesuffix("s"))
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
    budget = OBJECTS["PodDisruptionBudget", name]["spec"]
    labels = OBJECTS["Deployment", name]["spec"]["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"] == labels
    assert OBJECTS["Deployment", name]["spec"]["selector"]["matchLabels"] == labels
    assert container["image"] in {image["name"] for image in KUSTOMIZATION["images"]}


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_is_composes_with_gpus_of_its_own(name: str) -> None:
    container, service = _only_container(name), COMPOSE["services"][name.removeprefix("baton-")]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    compose = set(service["environment"]) - {"CUDA_VISIBLE_DEVICES"}
    assert compose <= set(_environ(name))
    assert SETTINGS["baton-engine"].items() <= service["environment"].items()
    assert SETTINGS["baton-cluster"] == COMPOSE["x-cluster"]
    # Each knows its role in its name only.
    both = [(FOLDER / f"{role}.yaml").read_text() for role in ("prefill", "decode")]
    assert both[0].replace("prefill", "decode") == both[1]


def test_the_service_leads_to_the_frontends() -> None:
    selector = OBJECTS["Service", "baton"]["spec"]["selector"]
    assert selector == OBJECTS["Deployment", "baton-frontend"]["spec"]["template"]["metadata"]["labels"]
