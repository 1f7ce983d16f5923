"""deploy/docker-compose.yml on a real Docker engine: built, served, killed in the middle, restarted, ended.

PYTHON_TAG and TORCH_INDEX in the environment go into the build."""

import os
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.answers import Stream
from tests.conftest import free_port
from tests.stack import MODEL, ROOT
from tests.system.test_serving import CALL, HEALTH_TOOL, QUESTION, RESULT
from tests.waiting import PATIENCE_S

Json = dict[str, Any]


class Compose:
    """The `cpu` profile as a project of its own, on free ports."""

    def __init__(self) -> None:
        ports = {
            name: str(free_port()) for name in ("HTTP_PORT", "ETCD_PORT", "NATS_PORT", "NATS_MONITOR_PORT")
        }
        self.url = f"http://127.0.0.1:{ports['HTTP_PORT']}"
        self._environ = os.environ | ports | {"BIND_ADDRESS": "127.0.0.1", "BATON_TAG": "test"}
        self._command = ["docker", "compose", "--project-name", "baton-test", "--profile", "cpu"]
        self._command += ["--file", str(ROOT / "deploy/docker-compose.yml")]

    def __call__(self, *words: str) -> str:
        """Run it; returns its output, fails the test with it."""
        ended = subprocess.run(
            [*self._command, *words], env=self._environ, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, f"{words}:\n{(ended.stdout + ended.stderr)[-4000:]}"
        return ended.stdout

    def up(self) -> None:
        """Start what does not run, with two decode workers; returns when a request can be served."""
        self("up", "--detach", "--no-build", "--wait", "--wait-timeout", "900", "--scale", "decode-cpu=2")

    def health(self) -> Json:
        health: Json = httpx.get(f"{self.url}/health").json()
        return health

    def chat(self, *messages: Json) -> Json:
        body = {"model": MODEL, "messages": messages, "tools": [HEALTH_TOOL], "max_tokens": 300}
        body["chat_template_args"] = {"reasoning_effort": "low"}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        choice: Json = answer.json()["choices"][0]
        return choice


def _has_engine() -> bool:
    try:
        asked = [["docker", "compose", "version"], ["docker", "info"]]
        return all(not subprocess.run(words, capture_output=True, check=False).returncode for words in asked)
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    if not _has_engine():
        pytest.skip("no Docker engine with Compose v2 answers here")
    compose = Compose()
    compose("build", "frontend", "decode-cpu")
    try:
        compose.up()
        yield compose
    finally:
        compose("down", "--volumes", "--timeout", "45")


def test_when_up_returns_the_guides_requests_are_answered(compose: Compose) -> None:
    health = compose.health()
    assert health["status"] == "healthy"
    assert sorted(instance["role"] for instance in health["instances"]) == ["decode", "decode", "prefill"]
    assert compose.chat(QUESTION)["finish_reason"] == "tool_calls"
    assert compose.chat(QUESTION, CALL, RESULT)["finish_reason"] == "stop"


def test_the_log_says_that_kv_streams_between_containers_and_nothing_alarms(compose: Compose) -> None:
    logs = compose("logs", "--no-log-prefix", "prefill-cpu", "decode-cpu")
    assert "kv streamed" in logs
    assert "ERROR" not in logs
    assert "nixl_agent" not in logs


def test_streams_go_on_when_a_decode_container_is_killed(compose: Compose) -> None:
    stack: Any = SimpleNamespace(url=compose.url, closing=[])
    whole = Stream(stack, 1000).read()
    container = compose("ps", "--quiet", "decode-cpu").split()[0]
    streams = [Stream(stack, 1000).read(5) for _ in range(2)]  # one on each
    subprocess.run(["docker", "kill", container], check=True, capture_output=True)
    for stream in streams:
        stream.read()
        assert (stream.text, stream.error, stream.done) == (whole.text, None, True)
    assert "lost worker=decode" in compose("logs", "--no-log-prefix", "frontend")
    for close in stack.closing:
        close()


def test_after_a_restart_it_serves_again_as_soon_as_it_is_healthy(compose: Compose) -> None:
    compose.up()  # the killed one too
    compose("restart", "--timeout", "45")
    compose.up()
    assert compose.chat(QUESTION)["finish_reason"] == "tool_calls"


def test_containers_drain_and_end_well(compose: Compose) -> None:
    stack: Any = SimpleNamespace(url=compose.url, closing=[])
    stream = Stream(stack, 1000).read(5)
    compose("stop", "--timeout", "45")
    assert stream.read().done
    states = compose("ps", "--all", "--format", "{{.Service}} {{.ExitCode}}").split("\n")
    ours = [state for state in states if state.startswith(("frontend", "prefill", "decode"))]
    assert [state.split()[1] for state in ours] == ["0"] * 4, states
