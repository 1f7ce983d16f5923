"""Both roles on one GPU through launch/gpt_oss_vllm.sh --one-gpu: answers outlive each role, and MPS itself.

The demo model in float32, whose answers repeat; without graphs and with small steps, so that a killed role
loads as fast as it can. Without MPS only the roles are killed. Each stage is printed with its time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tests.gpu.test_demo_model import QUESTIONS, VLLM, Json
from tests.gpu.vllm_scene import descendants, devices
from tests.launched import Launch
from tests.stack import MODEL, Stack
from tests.waiting import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

READY_S = 240.0
ENGINE = VLLM | {"enforce_eager": True, "max_num_batched_tokens": 256, "max_num_seqs": 16}
LONG = {"type": "array", "items": {"enum": [7, 42, 365]}, "minItems": 100, "maxItems": 100}
SAMPLING: list[Json] = [{"temperature": 0}] * 2 + [{"temperature": 1, "seed": seed} for seed in (5, 6)]


Stage = Callable[[str], None]


@pytest.fixture
def stage(capfd: pytest.CaptureFixture[str]) -> Stage:
    """Prints what held, and after how long, past pytest's capture: a run that is cut off shows it."""
    began = time.monotonic()

    def show(text: str) -> None:
        with capfd.disabled():
            sys.stdout.write(f"\n    {time.monotonic() - began:5.1f} s: {text}")
            sys.stdout.flush()

    return show


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    flags = f"--override-engine-args {json.dumps(ENGINE, separators=(',', ':'))}"
    engine = {"MODEL_PATH": "models/demo", "SERVED_MODEL_NAME": MODEL, "SKIP_DOCTOR": "1"}
    engine |= {"CUDA_VISIBLE_DEVICES": devices(0, 1)}
    engine |= {"PREFILL_EXTRA_FLAGS": flags, "DECODE_EXTRA_FLAGS": flags}
    folder = tmp_path_factory.mktemp("one-gpu")
    launch = Launch(folder, "20b", "--one-gpu", script="gpt_oss_vllm.sh", engine=engine)
    output = [launch.read_until("ready:")]
    assert launch.popen.stdout is not None
    threading.Thread(target=output.extend, args=[launch.popen.stdout], daemon=True).start()
    try:
        assert "ready:" in output[0]
        yield launch
    finally:
        launch.popen.terminate()
        launch.popen.wait(READY_S)
        sys.stdout.write("".join(output)[-20_000:])  # printed if a test failed


@pytest.fixture(scope="module")
def stack(launch: Launch) -> Stack:
    """Reads the launch's metrics."""
    stack = Stack(launch.run_dir)
    stack.url = launch.url
    return stack


def _mps(launch: Launch, command: str) -> list[str]:
    """The numbers that this stack's MPS answers; none without MPS."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return []
    environ = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(launch.run_dir / "mps")}
    done = subprocess.run(
        ["nvidia-cuda-mps-control"],
        input=f"{command}\n",
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
        env=environ,
    )
    return [word for word in done.stdout.split() if word.isdecimal()]


def _answers(launch: Launch, pool: ThreadPoolExecutor) -> list[Future[str]]:
    """Two greedy and two seeded answers of hundreds of tokens, under way."""

    def answer(sampling: Json) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": LONG}}
        body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 500}
        give_up = time.monotonic() + READY_S
        while True:
            response = httpx.post(
                f"{launch.url}/v1/chat/completions",
                json=body | {"response_format": form} | sampling,
                timeout=READY_S,
            )
            if response.status_code != 503 or time.monotonic() > give_up:
                break
            time.sleep(int(response.headers["retry-after"]))  # no decode worker yet
        assert response.status_code == 200, response.text
        content: str = response.json()["choices"][0]["message"]["content"]
        return content

    return [pool.submit(answer, sampling) for sampling in SAMPLING]


def _is_whole(stack: Stack) -> bool:
    roles = [worker["role"] for worker in stack.health().get("instances", [])]
    return sorted(roles) == ["decode", "prefill"]


def test_both_roles_are_clients_of_mps(launch: Launch) -> None:
    servers = _mps(launch, "get_server_list")
    if not servers:
        pytest.skip("no MPS here: the roles take turns")
    assert sum(len(_mps(launch, f"get_client_list {server}")) for server in servers) >= 2


@pytest.mark.parametrize("victim", ["mps", "decode", "prefill"])
def test_answers_outlive(launch: Launch, stack: Stack, victim: str, stage: Stage) -> None:
    if victim == "mps":
        pids = set(map(int, _mps(launch, "get_server_list")))
        if not pids:
            pytest.skip("no MPS here: the roles take turns")
    else:
        own = launch.pid_of(f"--disaggregation-mode {victim}")
        pids = {own} | descendants(own)
    with ThreadPoolExecutor() as pool:
        expected = [answer.result() for answer in _answers(launch, pool)]
        stage("four undisturbed answers")
        generated = stack.gauge("baton_worker_generated_tokens_total")
        answers = _answers(launch, pool)
        wait_for(lambda: stack.gauge("baton_worker_generated_tokens_total") > generated + 100)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        stage(f"{victim} killed beside four answers")
        # A role that does no work at the time notices the end of MPS with its next request: both at once.
        more = _answers(launch, pool)
        assert [answer.result() for answer in answers] == expected
        stage("those four are equal")
        assert [answer.result() for answer in more] == expected
        stage("so are four that came right after the kill")
    wait_for(lambda: _is_whole(stack), READY_S)
    stage("both roles serve again")
    stack.wait_idle(30)


def test_what_it_starts_ends_with_it(launch: Launch) -> None:
    launch.popen.send_signal(signal.SIGINT)
    launch.popen.wait(READY_S)
    wait_for(lambda: launch.processes() == {})
