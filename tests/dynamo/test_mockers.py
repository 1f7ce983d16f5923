"""Baton's frontend over Dynamo's own processes: its mockers 1.6.1, and workers on the runtime before it."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.answers import Stream
from tests.dynamo_stack import DynamoStack, disturbed, templated_model, under_streams
from tests.stack import MODEL, ROOT, START_TIMEOUT_S, Process
from tests.waiting import FAILOVER_S

pytestmark = pytest.mark.dynamo

_VENV = ROOT / ".venv-dynamo"
_TOKENS = 300


class MockerStack(DynamoStack):
    """A frontend of Baton's, and mockers."""

    def mocker(self, role: str) -> Process:
        """Dynamo's mocker in that role, about 7 ms a step."""
        if not (_VENV / ".made").exists():
            pytest.fail("there is no .venv-dynamo: run make test-dynamo")
        backend, plane = self.environ["BATON_DISCOVERY_BACKEND"], self.environ.get("DYN_REQUEST_PLANE", "tcp")
        command = [str(_VENV / "bin/python"), "-m", "dynamo.mocker", "--model-path"]
        command.append(str(templated_model(self.folder)))
        command += ["--model-name", MODEL, "--disaggregation-mode", role, "--speedup-ratio", "1"]
        command += ["--discovery-backend", backend, "--request-plane", plane]
        name = f"mocker-{role}-{len(self.processes)}"
        process = Process(name, command, self.folder / f"{name}.log", self.environ)
        self.processes.append(process)
        return process

    def mockers(self, *roles: str) -> list[Process]:
        """A frontend and mockers, ready: the mockers."""
        self.frontend()
        found = [self.mocker(role) for role in roles]
        self.wait_ready(roles.count("prefill"), roles.count("decode"), START_TIMEOUT_S)
        return found

    def longest_gap_s(self, disturb: Any, num: int = 32) -> float:
        """Of so many streams, disturbed once all have begun; each must be complete. The mocker's tokens are
        random, so texts cannot be compared."""
        begin = partial(Stream, self, _TOKENS, stream_options={"include_usage": True})
        reads = disturbed(begin, num, disturb)
        assert {read.num_tokens for read in reads} == {_TOKENS}
        return max(read.longest_gap_s for read in reads)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_mocker_costs_32_streams_nothing(role: str, tmp_path: Path) -> None:
    with MockerStack(tmp_path) as stack:
        victim = stack.mockers("prefill", "prefill", "decode", "decode")[0 if role == "prefill" else 2]
        assert stack.longest_gap_s(victim.kill) < FAILOVER_S


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_frozen_mocker_costs_32_streams_nothing(role: str, tmp_path: Path) -> None:
    with MockerStack(tmp_path) as stack:
        frozen = stack.mockers("prefill", "prefill", "decode", "decode")[0 if role == "prefill" else 2]
        assert stack.longest_gap_s(lambda: frozen.signal(signal.SIGSTOP)) < FAILOVER_S
        answers = [stack.post("/v1/completions", prompt="Hi", max_tokens=2) for _ in range(4)]
        assert {answer.status_code for answer in answers} == {200}


def test_the_only_mocker_of_a_role_is_drained_and_replaced(tmp_path: Path) -> None:
    with MockerStack(tmp_path) as stack:
        prefill, decode = stack.mockers("prefill", "decode")
        for old, role in ((prefill, "prefill"), (decode, "decode")):
            old.signal(signal.SIGTERM)
            stack.mocker(role)
            assert old.wait() == 0
            stack.wait_ready(1, 1)
            assert stack.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200


def test_four_apis_over_etcd_and_nats(tmp_path: Path, own_etcd: str, nats_server: str) -> None:
    environ = {"BATON_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": own_etcd}
    environ |= {"DYN_REQUEST_PLANE": "nats", "NATS_SERVER": nats_server}
    with MockerStack(tmp_path, environ) as stack:
        stack.mockers("prefill", "decode")
        hello = [{"role": "user", "content": "hi"}]
        assert stack.answer("/v1/chat/completions", messages=hello, max_tokens=5)["usage"]["total_tokens"] > 5
        assert stack.answer("/v1/completions", prompt="Hi", max_tokens=5)["choices"][0]["text"]
        assert stack.answer("/v1/responses", input="hi", max_output_tokens=5)["usage"]["output_tokens"] == 5
        assert stack.answer("/v1/messages", messages=hello, max_tokens=5)["usage"]["output_tokens"] == 5


def test_the_runtimes_own_decoder_takes_every_field(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    sampling: dict[str, Any] = {
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": 1,
        "presence_penalty": 1,
    }
    sampling |= {"repetition_penalty": 1.2, "seed": 2**62, "min_tokens": 2, "n": 2, "stop": ["zzz"]}
    chats: list[dict[str, Any]] = [
        {"response_format": form},
        {"tools": [tool], "tool_choice": "required"},
        {"logprobs": True, "top_logprobs": 3},
        {"cache_salt": "abc"},
    ]
    raw: list[dict[str, Any]] = [sampling, {"priority": -5}, {"ignore_eos": True}]
    with MockerStack(tmp_path) as stack:
        stack.mockers("prefill", "decode")
        for fields in chats:
            hello = [{"role": "user", "content": "hi"}]
            stack.answer("/v1/chat/completions", messages=hello, max_tokens=5, **fields)
        for fields in raw:
            stack.answer("/v1/completions", prompt="a", max_tokens=5, **fields)


def test_workers_on_the_runtime_1_5_and_on_1_6_serve_side_by_side(tmp_path: Path) -> None:
    with DynamoStack(tmp_path) as stack:
        stack.frontend()
        stack.double("prefill")
        stack.double("decode")
        newest = stack.environ.get("PYTHONPATH", "")
        stack.environ["PYTHONPATH"] = f"{_VENV / 'older'}:{newest}"
        old = [stack.double("prefill"), stack.double("decode")]
        stack.wait_ready(2, 2)
        loaded = Path(f"/proc/{old[0].popen.pid}/maps").read_text()
        assert str((_VENV / "older").resolve()) in loaded
        under_streams(stack, 8, old[1].kill, max_tokens=100)
