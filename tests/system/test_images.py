"""The `docker run` lines of docs/from-the-guides.md, without Docker: each command in the image's folder."""

import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conftest import free_port
from tests.image import Image, environment_of, stages
from tests.launched import Launch
from tests.stack import ROOT, START_TIMEOUT_S, Process
from tests.system.test_launch_commands import GUIDE_DECODE, GUIDE_FRONTEND, GUIDE_PREFILL, counterpart
from tests.waiting import wait_for

DOC = (ROOT / "docs/from-the-guides.md").read_text()
SWITCHES = {"--rm", "-it", "--init"}
EVERYWHERE = "127.0.0.2"  # answers if the frontend listens on every address, as `docker run -p` needs it


def docker(verb: str) -> list[list[str]]:
    """The words of each such command in the page's code blocks."""
    lines = re.findall(rf"^docker {verb} (?:.*\\\n)*.*$", DOC, re.MULTILINE)
    return [shlex.split(line.replace("\\\n", " "))[2:] for line in lines]


class Line:
    """One `docker run`: its options by name, the image, the command."""

    def __init__(self, words: list[str]) -> None:
        self.options: dict[str, list[str]] = {}
        words = [word for word in words if word not in SWITCHES]
        while words[0].startswith("-"):
            self.options.setdefault(words[0], []).append(words[1])
            words = words[2:]
        self.image, *self.command = words
        self.environ = dict(pair.split("=", 1) for pair in self.options.get("-e", []))


LINES = [Line(words) for words in docker("run")]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The worker image, with the demo model at the mount's path."""
    image = Image(tmp_path_factory.mktemp("worker"), "worker")
    (mount,) = {volume for line in LINES for volume in line.options["-v"]}
    image.path(mount.split(":")[1]).symlink_to(ROOT / "models/demo")
    return image


def _variables(line: Line, image: Image, port: int) -> dict[str, str]:
    """The line's variables, with the port and path as they are outside of a container."""
    inside = line.environ.get("HTTP_PORT", "8000")
    assert [published.split(":")[-1] for published in line.options["-p"]] == [inside]
    own = {"HTTP_PORT": str(port), "MODEL_PATH": str(image.path(line.environ.get("MODEL_PATH", "/model")))}
    # `--ipc host` shares this machine's shared memory with the container; doctor rightly refuses a small one.
    if shutil.disk_usage("/dev/shm").total < 1 << 30:
        own["SKIP_DOCTOR"] = "1"
    if line.command[-1] in ("low-latency", "max-throughput"):
        own["NUM_GPUS"] = "4"  # the demo model's experts: doctor refuses 8 GPUs, rightly
    return line.environ | own


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=[] if line.command[-1] == "spark" else pytest.mark.slow) for line in LINES],
    ids=lambda line: " ".join(line.command),
)
def test_the_command_of_a_docker_run_line_serves(line: Line, worker: Image, tmp_path: Path) -> None:
    script, *arguments = line.command
    launch = Launch(
        tmp_path / "run",
        *arguments,
        script=script.removeprefix("launch/"),
        engine={},
        image=worker,
        **_variables(line, worker, free_port()),
    )
    try:
        output = launch.read_until("ready: ")
        assert f"ready: http://127.0.0.1:{launch.port}" in output
        assert _completion_tokens(f"http://{EVERYWHERE}:{launch.port}") > 0
        settings = (launch.run_dir / "frontend.log").read_text()
        assert "discovery_backend=file" in settings
        assert "request_plane=tcp" in settings
    finally:
        launch.popen.send_signal(signal.SIGINT)
        status, output = launch.end()
    assert status == 130, output
    wait_for(lambda: launch.processes() == {})


def _completion_tokens(url: str) -> int:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["completion_tokens"]
    return tokens


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.kill()


@pytest.mark.slow
def test_the_guides_manual_launch_serves(worker: Image, processes: list[Process], tmp_path: Path) -> None:
    """Dynamo's "Option B" with only the module names changed: no engine is named."""
    port = str(free_port())
    for name, command in (("frontend", GUIDE_FRONTEND), ("prefill", GUIDE_PREFILL), ("decode", GUIDE_DECODE)):
        line = counterpart(command).replace(" --engine trtllm", "").replace("8000", port)
        words = shlex.split(line.replace(" /model ", f" {worker.path('/model')} "))
        visible = dict(word.split("=") for word in words if word.startswith("CUDA_VISIBLE_DEVICES="))
        log = tmp_path / f"{name}.log"
        words = ["env", "-C", str(worker.workdir), *words]
        processes.append(Process(name, words, log, worker.environ | visible))

    def endpoints() -> list[str]:
        dead = [process.text()[-2000:] for process in processes if process.popen.poll() is not None]
        assert not dead, dead
        try:
            listed: list[str] = httpx.get(f"http://{EVERYWHERE}:{port}/health").json()["endpoints"]
        except httpx.TransportError:
            return []
        return listed

    both = {"dyn://dynamo.tensorrt_llm.generate", "dyn://dynamo.prefill.generate"}
    wait_for(lambda: set(endpoints()) == both, timeout_s=3 * START_TIMEOUT_S)
    assert _completion_tokens(f"http://{EVERYWHERE}:{port}") > 0
    assert "engine=trtllm (chosen)" in processes[1].text()


def test_the_frontend_image_listens_on_every_address_by_default(
    processes: list[Process], tmp_path: Path
) -> None:
    image = Image(tmp_path / "image", "frontend")
    for extra, address in (({}, EVERYWHERE), ({"DYN_HTTP_HOST": "127.0.0.3"}, "127.0.0.3")):
        port = free_port()
        command = ["env", "-C", str(image.workdir), *image.command]
        environ = image.environ | {"HTTP_PORT": str(port)} | extra
        processes.append(Process("frontend", command, tmp_path / f"{port}.log", environ))
        wait_for(partial(_answers, f"http://{address}:{port}/live"), timeout_s=START_TIMEOUT_S)
        assert _answers(f"http://127.0.0.1:{port}/live") == (not extra)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_the_lines_images_are_built_by_the_page_and_sparks_is_the_release_that_works_there() -> None:
    built = {words[words.index("-t") + 1]: words for words in docker("build")}
    assert {line.image for line in LINES} == built.keys()
    assert all("--target worker" in " ".join(words) for words in built.values())
    assert stages()["worker"].base.endswith(":${TENSORRT_LLM_TAG}")
    (spark,) = (line for line in LINES if line.command[-1] == "spark")
    assert "TENSORRT_LLM_TAG=1.3.0rc12" in built[spark.image]
    assert "ARG TENSORRT_LLM_TAG=1.3.0rc29\n" in (ROOT / "deploy/Dockerfile").read_text()


def test_there_is_a_line_for_each_guide_with_the_guides_limits() -> None:
    assert [" ".join(line.command) for line in LINES] == [
        "launch/gpt_oss_disagg.sh",
        "launch/gpt_oss_agg.sh low-latency",
        "launch/gpt_oss_agg.sh max-throughput",
        "launch/gpt_oss_agg.sh spark",
        "launch/gpt_oss_20b.sh",
    ]
    for line in LINES:
        assert (line.options["--gpus"], line.options["--ipc"]) == (["all"], ["host"])
        assert line.options["--stop-timeout"] == ["120"]  # Docker's own 10 s would end answers
        assert {"memlock=-1", "stack=67108864"} <= set(line.options["--ulimit"])
    assert "nofile=65536:65536" in LINES[0].options["--ulimit"]
    assert LINES[0].options["--cap-add"] == ["SYS_PTRACE"]


def test_a_container_reaches_the_compose_files_etcd_and_nats_by_the_page() -> None:
    compose: dict[str, Any] = yaml.safe_load((ROOT / "deploy/docker-compose.yml").read_text())
    (words,) = re.findall(r"`(--network \w+ -e ETCD[^`]+)`", DOC)
    line = Line([*shlex.split(words), "baton-worker"])
    assert line.options["--network"] == [compose["name"]]
    assert compose["networks"]["default"]["name"] == "${COMPOSE_PROJECT_NAME}"
    assert line.environ == compose["x-cluster"]
    assert environment_of("worker")["HTTP_HOST"] == environment_of("frontend")["HTTP_HOST"] == "0.0.0.0"
