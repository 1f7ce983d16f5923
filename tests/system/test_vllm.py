"""`--engine vllm` as real processes, with vLLM's double in place of the library."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.asking import chat, complete
from tests.conftest import LaunchServer
from tests.launched import DOUBLE, Launch
from tests.stack import MODEL, ROOT, Process, Stack
from tests.system.test_serving import CALL, GUIDE, QUESTION, RESULT
from tests.waiting import PATIENCE_S, wait_for

YAML = "max_num_seqs: 32\nmax_num_batched_tokens: 256\nblock_size: 16\n"


def worker(stack: Stack, folder: Path, mode: str, name: str, **environ: str) -> Process:
    """A worker with the demo model."""
    yaml = folder / "engine.yaml"
    yaml.write_text(YAML)
    stack.environ |= environ
    try:
        return stack.worker(mode, engine="vllm", yaml=yaml, name=name)
    finally:
        for key in environ:
            del stack.environ[key]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    doubles = os.pathsep.join([str(ROOT / "tests/doubles"), os.environ.get("PYTHONPATH", "")])
    stack = Stack(tmp_path, {"PYTHONPATH": doubles.rstrip(os.pathsep)})
    stack.frontend()
    yield stack
    stack.stop()


def test_both_rounds_of_the_guides_conversation_are_answered(stack: Stack, tmp_path: Path) -> None:
    prefill = worker(stack, tmp_path, "prefill", "prefill")
    worker(stack, tmp_path, "decode", "decode")
    stack.wait_ready(1, 1)
    num_before = stack.gauge("baton_num_handoffs")  # the pair has warmed up

    asked = chat(stack, QUESTION)
    answered = chat(stack, QUESTION, CALL, RESULT)

    (call,) = asked["message"]["tool_calls"]
    assert call["function"] == {"name": "get_system_health", "arguments": "{}"}
    assert (asked["finish_reason"], answered["finish_reason"]) == ("tool_calls", "stop")
    assert "372045" in answered["message"]["content"]
    assert stack.gauge("baton_num_handoffs") - num_before == 4  # two on each side
    stack.wait_idle()
    assert "kv_transfer_config.kv_role=kv_producer (baton)" in prefill.text()
    assert f"kv=nixl:{ROOT}/models/demo" in prefill.text()
    assert {instance["engine"] for instance in stack.health()["instances"]} == {"vllm"}
    prefill.signal(signal.SIGTERM)
    assert prefill.wait() == 0


@pytest.mark.slow
def test_the_launch_script_serves_with_the_shipped_configs(
    launch_etcd: LaunchServer, launch_nats: LaunchServer, tmp_path: Path
) -> None:
    shorter = "--max-seq-len 4096 --max-num-tokens 512"  # the demo model's limit; a short warm-up
    environ = {"ETCD_ENDPOINTS": launch_etcd().url, "NATS_SERVER": launch_nats().url}
    environ |= {"ENGINE": "vllm", "PREFILL_EXTRA_FLAGS": shorter, "DECODE_EXTRA_FLAGS": shorter}
    launch = Launch(tmp_path / "run", "20b", script="gpt_oss_vllm.sh", engine=DOUBLE | environ)
    try:
        assert "(1 prefill, 1 decode)" in launch.read_until("ready: ")
        body = GUIDE | {"model": "openai/gpt-oss-20b", "messages": [QUESTION]}
        answer = httpx.post(
            f"http://127.0.0.1:{launch.port}/v1/chat/completions", json=body, timeout=PATIENCE_S
        )
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls", answer.text
    finally:
        launch.popen.terminate()
        launch.popen.communicate(timeout=PATIENCE_S)


@pytest.mark.slow
def test_a_dead_core_ends_its_worker_and_the_requests_go_on_elsewhere(stack: Stack, tmp_path: Path) -> None:
    worker(stack, tmp_path, "agg", "sound")
    stack.wait_ready(0, 1)
    expected = complete(stack, 400)
    doomed = worker(stack, tmp_path, "agg", "doomed", DOUBLE_VLLM_DIES_AFTER="100")
    stack.wait_ready(0, 2)

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(complete, stack, 400) for _ in range(4)]
        assert {answer.result() for answer in answers} == {expected}

    assert doomed.wait() == 1
    assert "vLLM's engine core died" in doomed.text()
    wait_for(lambda: len(stack.health()["instances"]) == 1)


@pytest.mark.slow
def test_a_killed_prefill_worker_loses_no_answer(stack: Stack, tmp_path: Path) -> None:
    decode = worker(stack, tmp_path, "decode", "decode")
    killed = worker(stack, tmp_path, "prefill", "prefill")
    stack.wait_ready(1, 1)
    expected = complete(stack, 60)

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(complete, stack, 60) for _ in range(8)]
        killed.kill()
        assert {answer.result() for answer in answers} == {expected}

    assert "GARBAGE" not in decode.text()
    stack.wait_idle()


@pytest.mark.slow
def test_a_client_that_leaves_leaves_no_pin(stack: Stack, tmp_path: Path) -> None:
    worker(stack, tmp_path, "prefill", "prefill")
    worker(stack, tmp_path, "decode", "decode")
    stack.wait_ready(1, 1)
    body = {"model": MODEL, "prompt": "one two three " * 200, "max_tokens": 900, "ignore_eos": True}

    def leave(after_s: float) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{stack.url}/v1/completions", json=body, timeout=httpx.Timeout(PATIENCE_S, read=after_s)
            )

    with ThreadPoolExecutor(8) as pool:
        for left in [pool.submit(leave, 0.05 * (i + 1)) for i in range(8)]:
            left.result()

    stack.wait_idle()
