"""A real Prometheus scrapes a small stack behind two frontends: names, dashboards, alerts."""

import json
import math
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import yaml

from frontend.metrics import KINDS
from tests.conftest import ServerProcess, binary, free_port
from tests.stack import ROOT, Process, Stack
from tests.waiting import wait_for

OBSERVABILITY = ROOT / "deploy/observability"
EXPRESSIONS = {
    f"{panel['title']}: {target['legendFormat']}": target["expr"]
    for path in (OBSERVABILITY / "grafana/dashboards").glob("*.json")
    for panel in json.loads(path.read_text())["panels"]
    for target in panel["targets"]
}
ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((OBSERVABILITY / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
}
NOT_OF_THE_MOCKER = re.compile("KV cache in use|speed of a move")  # it has no cache, and moves take no time
Labels = frozenset[tuple[str, str]]


class Scene(NamedTuple):
    """Two frontends of the same workers, the first with two processes."""

    stack: Stack
    workers: Mapping[str, Process]
    second: tuple[Process, str]
    prometheus: str

    def query(self, expression: str) -> dict[Labels, float]:
        reply = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": expression}).json()
        assert reply["status"] == "success", reply
        found = {frozenset(row["metric"].items()): float(row["value"][1]) for row in reply["data"]["result"]}
        return {labels: value for labels, value in found.items() if not math.isnan(value)}


def promtool(*arguments: str, page: str = "") -> str:
    command = [binary("promtool", "prometheus"), *arguments]
    done = subprocess.run(command, input=page, capture_output=True, text=True, check=False, cwd=ROOT)
    return f"{done.stdout}{done.stderr}" if done.returncode else ""


def configured(folder: Path, *urls: str) -> Path:
    """deploy's configuration with these frontends, scraped twice a second."""
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms"}
    config["rule_files"] = [str(OBSERVABILITY / name) for name in config["rule_files"]]
    config["scrape_configs"] = config["scrape_configs"][:1]
    targets = [url.removeprefix("http://") for url in urls]
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    return folder / "prometheus.yml"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """After one request."""
    folder = tmp_path_factory.mktemp("monitoring")
    with Stack(folder, {"TMPDIR": str(folder)}) as stack:
        workers = stack.serve("prefill", "decode", engine="mocker", flags=("--num-processes", "2"))
        second = stack.another_frontend()
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [
            binary("prometheus", "prometheus"),
            f"--config.file={configured(folder, stack.url, second[1])}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        server = ServerProcess(command, url, folder / "server", ready=b"ready to receive web requests")
        server.start()
        try:
            found = Scene(stack, {worker.name: worker for worker in workers}, second, url)
            wait_for(lambda: len(found.query("baton_time_to_first_token_seconds_count > -1")) >= 8)
            stack.answer("/v1/chat/completions", messages=[{"role": "user", "content": "Hey"}], max_tokens=40)
            yield found
        finally:
            server.kill()


def test_the_files_of_the_deployment_are_valid_and_each_fault_raises_its_alert() -> None:
    assert not promtool("check", "config", str(OBSERVABILITY / "prometheus.yml"))
    assert not promtool("test", "rules", "tests/data/alerts_test.yml")
    texts = Path(ROOT / "tests/data/alerts_test.yml").read_text()
    assert all(f'alertname="{name}"' in texts for name in ALERTS)


def test_the_names_are_those_of_a_well_kept_exporter(scene: Scene) -> None:
    assert not promtool("check", "metrics", page=scene.stack.get("/metrics").text)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_panel_has_data_after_one_request(scene: Scene, name: str) -> None:
    if NOT_OF_THE_MOCKER.search(name):
        page = scene.stack.get("/metrics").text
        assert all(each in page for each in re.findall(r"baton_\w+", EXPRESSIONS[name]))
        return
    wait_for(lambda: scene.query(EXPRESSIONS[name]))


def test_two_frontends_and_two_processes_double_nothing(scene: Scene) -> None:
    """Of a figure that each frontend shows, a panel draws what one of them would draw."""
    shown_by_each = {name for name, kind in KINDS.items() if kind.merge is max or "worker" in kind.labels}
    sent = 'baton_handoffs_total{role="prefill"}'
    wait_for(lambda: scene.query(f"max by (worker) ({sent})") == scene.query(f"min by (worker) ({sent})"))
    one = f'instance="{scene.second[1].removeprefix("http://")}"'
    for name, expression in EXPRESSIONS.items():
        metrics = {metric.removesuffix("_total") for metric in re.findall(r"baton_(\w+)", expression)}
        if metrics <= shown_by_each and not NOT_OF_THE_MOCKER.search(name):
            now = re.sub(r"(rate|increase)\((\S+?)\[\w+\]\)", r"\2", expression)
            alone = re.sub(r"(baton_\w+)(?:\{(.*?)\})?", rf"\1{{\2,{one}}}", now).replace("{,", "{")
            assert scene.query(now) == scene.query(alone), name
    assert scene.query('max by (role) (baton_workers{state="live"})') == {
        frozenset({("role", role)}): 1.0 for role in ("prefill", "decode")
    }
    page = scene.stack.get("/metrics").text
    assert re.search(r'^baton_workers\{role="decode",state="live"\} 1.0$', page, re.MULTILINE)


def test_requests_of_both_processes_are_added(scene: Scene) -> None:
    total = 'sum(baton_requests_total{route="/v1/completions"})'
    num_before = scene.query(total)[frozenset()]
    for _ in range(4):  # in turn
        scene.stack.answer("/v1/completions", prompt="Hi", max_tokens=1)
    wait_for(lambda: scene.query(total) == {frozenset(): num_before + 4})


def test_a_lost_worker_and_a_lost_frontend_are_alerts(scene: Scene) -> None:
    decode = next(worker for name, worker in scene.workers.items() if name.startswith("decode"))
    decode.kill()
    wait_for(lambda: scene.query(ALERTS["BatonNoDecodeWorker"]))
    wait_for(lambda: scene.query(ALERTS["BatonWorkerLost"]).keys() == {frozenset({("worker", decode.name)})})
    scene.second[0].kill()
    wait_for(lambda: scene.query(ALERTS["BatonFrontendDown"]))
