"""`--engine trtllm` as real processes, with TensorRT-LLM's double in place of the library."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.asking import chat, complete
from tests.stack import MODEL, ROOT, Process, Stack
from tests.system.test_serving import CALL, QUESTION, RESULT
from tests.waiting import PATIENCE_S, wait_for

DOUBLES = ROOT / "tests/doubles"
# The guide's files, with a buffer and a KV timeout for a test.
PREFILL_YAML = """
enable_attention_dp: false
disable_overlap_scheduler: true
moe_config:
  backend: CUTLASS
enable_chunked_prefill: true
cuda_graph_config:
  max_batch_size: 32
  enable_padding: true
cache_transceiver_config:
  backend: ucx
  max_tokens_in_buffer: 65536
  kv_transfer_timeout_ms: 2000
print_iter_log: false
stream_interval: 10
"""
DECODE_YAML = (
    PREFILL_YAML.replace("overlap_scheduler: true", "overlap_scheduler: false") + "backend: pytorch\n"
)


def worker(stack: Stack, folder: Path, mode: str, name: str, *arguments: str, **environ: str) -> Process:
    """A worker with the guide's command line plus `--engine trtllm`; the demo model replaces the real one."""
    yaml = folder / f"{mode}.yaml"
    yaml.write_text(PREFILL_YAML if mode == "prefill" else DECODE_YAML)
    command = ["--engine", "trtllm", "--model-path", "models/demo", "--served-model-name", MODEL]
    command += ["--extra-engine-args", str(yaml), "--dyn-reasoning-parser", "gpt_oss"]
    command += ["--dyn-tool-call-parser", "harmony", "--disaggregation-mode", mode]
    command += ["--max-num-tokens", "16384", "--max-batch-size", "32", "--free-gpu-memory-fraction", "0.9"]
    command += ["--tensor-parallel-size", "4", "--expert-parallel-size", "4", *arguments]
    stack.environ |= environ
    try:
        return stack.start(name, "workers", *command)
    finally:
        for key in environ:
            del stack.environ[key]


@pytest.fixture
def stack(tmp_path: Path, own_etcd: str, nats_server: str) -> Iterator[Stack]:
    environ = {
        "BATON_DISCOVERY_BACKEND": "etcd",
        "BATON_REQUEST_PLANE": "nats",
        "ETCD_ENDPOINTS": own_etcd,
        "NATS_SERVER": nats_server,
        "PYTHONPATH": os.pathsep.join([str(DOUBLES), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    stack = Stack(tmp_path, environ)
    stack.frontend("--wait-for-worker-s", "0")
    yield stack
    stack.stop()


def test_both_rounds_of_the_guides_conversation_are_answered(stack: Stack, tmp_path: Path) -> None:
    prefill = worker(stack, tmp_path, "prefill", "prefill")
    decode = worker(stack, tmp_path, "decode", "decode")
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
    assert "warm pair" in prefill.text() + decode.text()
    assert "cache_transceiver_config.backend=UCX" in decode.text()
    assert "free_gpu_memory_fraction=0.9 (flag)" in prefill.text()
    instances = stack.health()["instances"]
    assert {instance["engine"] for instance in instances} == {"trtllm"}
    prefill.signal(signal.SIGTERM)
    assert prefill.wait() == 0


@pytest.mark.slow
def test_a_client_that_leaves_ends_its_prefill(stack: Stack, tmp_path: Path) -> None:
    worker(stack, tmp_path, "prefill", "prefill", DOUBLE_TRTLLM_PREFILL_S_A_TOKEN="0.05")
    worker(stack, tmp_path, "decode", "decode")
    stack.wait_ready(1, 1)
    body = {"model": MODEL, "prompt": "word " * 500, "max_tokens": 4}  # a minute of prefill

    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{stack.url}/v1/completions", json=body, timeout=3)

    stack.wait_idle(15)


@pytest.mark.slow
def test_a_killed_prefill_worker_loses_no_answer(stack: Stack, tmp_path: Path) -> None:
    worker(stack, tmp_path, "decode", "decode")
    killed, other = (worker(stack, tmp_path, "prefill", name) for name in ("one", "two"))
    stack.wait_ready(2, 1)
    expected = complete(stack)

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(complete, stack) for _ in range(8)]
        killed.kill()
        assert {answer.result() for answer in answers} == {expected}
    other.kill()

    assert complete(stack) == expected
    stack.wait_idle(15)


@pytest.mark.slow
def test_a_stream_outlives_its_decode_worker(stack: Stack, tmp_path: Path) -> None:
    worker(stack, tmp_path, "prefill", "prefill")
    killed = worker(stack, tmp_path, "decode", "one")
    worker(stack, tmp_path, "decode", "two")
    stack.wait_ready(1, 2)
    expected = complete(stack, 400)

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(complete, stack, 400) for _ in range(4)]
        wait_for(lambda: stack.gauge("baton_num_running") >= 4)
        killed.kill()
        assert {answer.result() for answer in answers} == {expected}


def test_a_dead_engine_ends_its_worker_with_a_named_error_and_status_1(stack: Stack, tmp_path: Path) -> None:
    doomed = worker(stack, tmp_path, "agg", "doomed", DOUBLE_TRTLLM_DIES_AFTER="6")
    stack.wait_ready(0, 1)
    body = {"model": MODEL, "prompt": "one two three", "max_tokens": 400, "ignore_eos": True}

    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=PATIENCE_S)

    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "worker_lost"
    assert doomed.wait() == 1
    assert "injected death" in doomed.text()


@pytest.mark.slow
def test_a_dead_engines_answers_go_on_at_another_worker(stack: Stack, tmp_path: Path) -> None:
    doomed = worker(stack, tmp_path, "agg", "doomed", DOUBLE_TRTLLM_DIES_AFTER="6")
    worker(stack, tmp_path, "agg", "sound")
    stack.wait_ready(0, 2)

    answers = {complete(stack) for _ in range(2)}  # one begins at each

    assert len(answers) == 1
    assert doomed.wait() == 1
    assert "injected death" in doomed.text()


@pytest.mark.slow
def test_an_answer_with_a_form_is_made_again_at_another_worker(stack: Stack, tmp_path: Path) -> None:
    doomed = worker(stack, tmp_path, "agg", "doomed", DOUBLE_TRTLLM_DIES_AFTER="6")
    worker(stack, tmp_path, "agg", "sound")
    stack.wait_ready(0, 2)
    form = {"guided_json": {"type": "object"}, "min_tokens": 200}

    answers = {complete(stack, 200, **form) for _ in range(2)}  # one begins at each

    assert len(answers) == 1
    assert doomed.wait() == 1
    assert "after not_resumable" in stack.processes[0].text()


def test_a_release_that_is_too_old_is_refused_at_start(stack: Stack, tmp_path: Path) -> None:
    old = worker(stack, tmp_path, "agg", "old", DOUBLE_TRTLLM_BUILD="1.2.1")

    assert old.wait(60) == 2
    assert "error: TensorRT-LLM 1.2.1 is too old; install tensorrt-llm 1.3" in old.text()


def test_a_loading_worker_dies_at_once_on_a_signal(stack: Stack, tmp_path: Path) -> None:
    loading = worker(stack, tmp_path, "agg", "loading", DOUBLE_TRTLLM_LOADS_S="3600")
    wait_for(lambda: "loading model" in loading.text())

    loading.signal(signal.SIGTERM)

    assert loading.wait() == -signal.SIGTERM
