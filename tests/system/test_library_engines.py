"""`--engine trtllm` and `--engine vllm` as real processes, with doubles in place of the libraries."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.number_check import PROMPTS
from tests.launched import DOUBLE, Run
from tests.stack import ROOT, Process, Stack, cluster
from tests.system.test_serving import CALL, GUIDE, QUESTION, RESULT
from tests.waiting import PATIENCE_S, wait_for

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
YAMLS = {
    "trtllm": {"prefill": PREFILL_YAML, "decode": DECODE_YAML, "agg": DECODE_YAML},
    "vllm": dict.fromkeys(
        ("prefill", "decode", "agg"), "max_num_seqs: 32\nmax_num_batched_tokens: 256\nblock_size: 16\n"
    ),
}
# The rest of the guide's command line.
FLAGS = {
    "trtllm": [
        *("--dyn-reasoning-parser", "gpt_oss", "--dyn-tool-call-parser", "harmony"),
        *("--max-num-tokens", "16384", "--max-batch-size", "32", "--free-gpu-memory-fraction", "0.9"),
        *("--tensor-parallel-size", "4", "--expert-parallel-size", "4"),
    ],
    "vllm": [],
}
AFTER = str(6 + len(PROMPTS))  # outputs: each worker scores the prompts first
DEATHS = {"trtllm": ("DOUBLE_TRTLLM_DIES_AFTER", AFTER), "vllm": ("DOUBLE_VLLM_DIES_AFTER", "110")}
LAST_WORDS = {"trtllm": "injected death", "vllm": "vLLM's engine core died"}

Worker = Callable[..., Process]
"""`worker(MODE, VARIABLE=value...)` of the test's engine."""

trtllm_only = pytest.mark.parametrize("engine", ["trtllm"])


@pytest.fixture(params=["trtllm", pytest.param("vllm", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def stack(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    """A frontend that waits for no worker; over etcd and NATS with TensorRT-LLM, as in its guide."""
    path = [str(ROOT / "tests/doubles"), os.environ.get("PYTHONPATH", "")]
    environ = {"PYTHONPATH": os.pathsep.join(path).rstrip(os.pathsep)}
    if engine == "trtllm":
        environ |= cluster(request.getfixturevalue("own_etcd"), request.getfixturevalue("nats_server"))
    with Stack(tmp_path, environ) as stack:
        stack.frontend("--wait-for-worker-s", "0")
        yield stack


@pytest.fixture
def worker(engine: str, stack: Stack, tmp_path: Path) -> Worker:
    def start(mode: str, **environ: str) -> Process:
        yaml = tmp_path / f"{mode}.yaml"
        yaml.write_text(YAMLS[engine][mode])
        before = stack.environ
        stack.environ = before | environ
        try:
            return stack.worker(mode, *FLAGS[engine], engine=engine, yaml=yaml)
        finally:
            stack.environ = before

    return start


def complete(stack: Stack, num_tokens: int = 120, **fields: object) -> str:
    """A greedy answer of `max_tokens` tokens, or with other `fields` than `ignore_eos`."""
    body: dict[str, Any] = {"prompt": "one two three", "max_tokens": num_tokens, "temperature": 0}
    answer = stack.answer("/v1/completions", **body, **(fields or {"ignore_eos": True}))
    text: str = answer["choices"][0]["text"]
    return text


def test_both_rounds_of_the_guides_conversation_are_answered(
    engine: str, stack: Stack, worker: Worker
) -> None:
    prefill, decode = worker("prefill"), worker("decode")
    stack.wait_ready(1, 1)
    num_before = stack.gauge("baton_handoffs_total")  # the pair has warmed up

    called, answered = (
        stack.answer("/v1/chat/completions", **GUIDE | {"messages": messages})["choices"][0]
        for messages in ([QUESTION], [QUESTION, CALL, RESULT])
    )

    (call,) = called["message"]["tool_calls"]
    assert call["function"] == {"name": "get_system_health", "arguments": "{}"}
    assert (called["finish_reason"], answered["finish_reason"]) == ("tool_calls", "stop")
    assert "372045" in answered["message"]["content"]
    assert stack.gauge("baton_handoffs_total") - num_before == 4  # two on each side
    stack.wait_idle()
    assert "warm pair" in prefill.text() + decode.text()
    logged = {
        "trtllm": ["cache_transceiver_config.backend=UCX", "free_gpu_memory_fraction=0.9 (flag)"],
        "vllm": ["kv_transfer_config.kv_role=kv_producer (baton)", f"kv=nixl:{ROOT}/models/demo"],
    }
    assert all(setting in prefill.text() for setting in logged[engine])
    assert {instance["engine"] for instance in stack.health()["instances"]} == {engine}
    prefill.signal(signal.SIGTERM)
    assert prefill.wait() == 0


@pytest.mark.slow
def test_a_killed_prefill_worker_loses_no_answer(stack: Stack, worker: Worker) -> None:
    decode, killed, other = worker("decode"), worker("prefill"), worker("prefill")
    stack.wait_ready(2, 1)
    expected = complete(stack)

    for process in (killed, other):
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(complete, stack) for _ in range(8)]
            process.kill()
            assert {answer.result() for answer in answers} == {expected}

    assert complete(stack) == expected
    assert "GARBAGE" not in decode.text()
    stack.wait_idle()


@pytest.mark.slow
def test_a_dead_engines_answers_go_on_at_another_worker(engine: str, stack: Stack, worker: Worker) -> None:
    worker("agg")
    stack.wait_ready(0, 1)
    expected = complete(stack)
    doomed = worker("agg", **dict([DEATHS[engine]]))
    stack.wait_ready(0, 2)

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(complete, stack) for _ in range(4)]
        assert {answer.result() for answer in answers} == {expected}

    assert doomed.wait() == 1
    assert LAST_WORDS[engine] in doomed.text()
    wait_for(lambda: len(stack.health()["instances"]) == 1)


@trtllm_only
@pytest.mark.slow
def test_an_answer_with_a_form_is_made_again_at_another_worker(stack: Stack, worker: Worker) -> None:
    doomed, _ = worker("agg", DOUBLE_TRTLLM_DIES_AFTER=AFTER), worker("agg")
    stack.wait_ready(0, 2)
    form = {"guided_json": {"type": "object"}, "min_tokens": 200}

    answers = {complete(stack, 200, **form) for _ in range(2)}  # one begins at each

    assert len(answers) == 1
    assert doomed.wait() == 1
    assert "reason=not_resumable" in stack.processes[0].text()


@trtllm_only
@pytest.mark.parametrize(("what", "says"), [("LOADS", "loading model"), ("IMPORTS", "importing")])
def test_a_loading_worker_dies_at_once_on_a_signal(worker: Worker, what: str, says: str) -> None:
    loading = worker("agg", **{f"DOUBLE_TRTLLM_{what}_S": "3600"})
    wait_for(lambda: says in loading.text())

    loading.signal(signal.SIGTERM)

    assert loading.wait() == -signal.SIGTERM


@pytest.mark.slow
def test_the_launch_script_serves_with_the_shipped_configs(run: Run, services: dict[str, str]) -> None:
    shorter = "--max-seq-len 4096 --max-num-tokens 512"  # the demo model's limit; a short warm-up
    environ = {"ENGINE": "vllm", "PREFILL_EXTRA_FLAGS": shorter, "DECODE_EXTRA_FLAGS": shorter}
    launch = run("gpt_oss_vllm.sh 20b", DOUBLE | environ, **services)
    assert "(1 prefill, 1 decode)" in launch.read_until("ready: ")
    body = GUIDE | {"model": "openai/gpt-oss-20b", "messages": [QUESTION]}
    answer = httpx.post(f"{launch.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls", answer.text
