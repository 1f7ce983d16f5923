"""What happens behind Dynamo's frontend when clients leave, and workers die or drain."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.answers import Stream
from tests.dynamo.behind import Behind
from tests.dynamo_stack import under_streams
from tests.stack import MODEL, START_TIMEOUT_S
from tests.waiting import FAILOVER_S, PATIENCE_S, wait_for

NUM_TOKENS = 300

pytestmark = pytest.mark.dynamo


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Behind]:
    """Nothing runs yet."""
    with Behind(tmp_path) as stack:
        (tmp_path / "mocker.yaml").write_text("decode_step_ms: 10\n")
        yield stack


def ended(stack: Behind, prompt: str, num_tokens: int = NUM_TOKENS) -> tuple[int, str | None]:
    """How many tokens a streamed completion has, and how it ended."""
    read = Stream(stack, num_tokens, prompt, stream_options={"include_usage": True}).read()
    return read.num_tokens, read.finish_reason


def test_a_client_that_disconnects_frees_its_slot_at_once(stack: Behind, tmp_path: Path) -> None:
    prefill, decode = stack.behind("prefill", "decode", yaml=tmp_path / "mocker.yaml")
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=PATIENCE_S) as reply:
        assert reply.status_code == 200
        wait_for(lambda: stack.figure(decode, "num_running") == 1)
    since_s = time.monotonic()
    stack.wait_idle_workers(prefill, decode)
    assert time.monotonic() - since_s < 4000 * 0.01 / 2  # not by its end


def test_decode_serves_alone_before_prefill_is_there_and_after_it_is_gone(
    stack: Behind, tmp_path: Path
) -> None:
    (decode,) = stack.behind("decode", yaml=tmp_path / "mocker.yaml")
    assert stack.figure(decode, "num_handoffs") == 0
    prefill = stack.own("prefill", yaml=tmp_path / "mocker.yaml")

    def is_handed_over() -> bool:
        stack.post("/v1/completions", prompt="Hi", max_tokens=2)  # while Dynamo's frontend changes its route
        return stack.figure(decode, "num_handoffs") > 0

    wait_for(is_handed_over)
    prefill.kill()
    wait_for(lambda: stack.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200)


def test_a_drained_worker_finishes_its_streams_and_exits_with_0(stack: Behind, tmp_path: Path) -> None:
    first, second, _ = stack.behind("decode", "decode", "prefill", yaml=tmp_path / "mocker.yaml")
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ended, stack, f"Story {i}", 3 * NUM_TOKENS) for i in range(8)]
        wait_for(lambda: sum(stack.figure(each, "num_running") for each in (first, second)) == 8)
        first.signal(signal.SIGTERM)
        ends = [each.result(PATIENCE_S) for each in running]
    assert first.wait() == 0
    assert ends == [(3 * NUM_TOKENS, "length")] * 8
    assert ended(stack, "One more", 4) == (4, "length")


def test_a_worker_answers_dynamos_canaries_and_still_exits_with_0(tmp_path: Path) -> None:
    canaries = {"DYN_HEALTH_CHECK_ENABLED": "true", "DYN_CANARY_WAIT_TIME": "1"}
    with Behind(tmp_path, canaries) as stack:
        workers = [stack.own(mode, engine="embedded") for mode in ("prefill", "decode")]
        for worker in workers:
            wait_for(lambda: " ready worker=" in worker.text(), START_TIMEOUT_S)  # noqa: B023  called at once
            wait_for(lambda: stack.figure(worker, "num_generated_tokens") > 1)  # noqa: B023  called at once
            assert stack.figure(worker, "kv_pinned_blocks") == 0
            worker.signal(signal.SIGTERM)
            assert worker.wait() == 0


def test_dynamos_migration_goes_on_on_another_decode_worker(stack: Behind, tmp_path: Path) -> None:
    flags = ("--migration-limit", "3")
    first, *_ = stack.behind("decode", "decode", "prefill", flags=flags, yaml=tmp_path / "mocker.yaml")
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ended, stack, f"Story {i}") for i in range(8)]
        wait_for(lambda: stack.figure(first, "num_running") > 0)
        first.kill()
        ends = [each.result(PATIENCE_S) for each in running]
    assert ends == [(NUM_TOKENS, "length")] * 8


def test_a_handoff_of_another_fleet_is_refused_and_a_line_says_why(stack: Behind, tmp_path: Path) -> None:
    decode, prefill = stack.behind("decode", "prefill", yaml=tmp_path / "mocker.yaml")
    prefill.signal(signal.SIGTERM)
    assert prefill.wait() == 0
    other = stack.own("prefill", engine="embedded")
    wait_for(lambda: " ready worker=" in other.text())

    def is_refused() -> bool:  # a 503 before that may come of the worker that ended
        answer = stack.post("/v1/completions", prompt="Hi", max_tokens=2)
        return answer.status_code == 503 and "the handoff is another fleet's" in decode.text()

    wait_for(is_refused)
    assert "engine embedded" in decode.text()


def test_etcd_and_nats_carry_the_same(tmp_path: Path, etcd_server: str, nats_server: str) -> None:
    wires = {"BATON_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": etcd_server, "NATS_SERVER": nats_server}
    with Behind(tmp_path, wires | {"DYN_REQUEST_PLANE": "nats"}) as stack:
        _, decode = stack.behind("prefill", "decode")
        assert ended(stack, "Hi", 20) == (20, "length")
        assert stack.figure(decode, "kv_moved_bytes") > 0


@pytest.mark.parametrize(("engine", "num_tokens"), [("mocker", NUM_TOKENS), ("embedded", 60)])
def test_sampled_streams_of_batons_frontend_over_dynamo_outlive_a_killed_worker(
    stack: Behind, tmp_path: Path, engine: str, num_tokens: int
) -> None:
    yaml = tmp_path / "mocker.yaml" if engine == "mocker" else None
    stack.frontend()
    first, *_ = [stack.own(mode, engine=engine, yaml=yaml) for mode in ("decode", "decode", "prefill")]
    stack.wait_ready(1, 2)

    # The texts are those of undisturbed streams.
    under_streams(stack, 8, first.kill, max_tokens=num_tokens, temperature=1, seed=5)


def test_a_killed_frontend_of_batons_leaves_nothing_running(stack: Behind, tmp_path: Path) -> None:
    stack.frontend()
    frontend = stack.processes[0]
    workers = [stack.own(mode, yaml=tmp_path / "mocker.yaml") for mode in ("prefill", "decode")]
    stack.wait_ready(1, 1)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(under_kill, stack) for _ in range(4)]
        wait_for(lambda: stack.figure(workers[1], "num_running") == 4)
        since_s = time.monotonic()
        frontend.kill()
        stack.wait_idle_workers(*workers)
        assert time.monotonic() - since_s < 3000 * 0.01 / 2  # not by their end
        for each in running:
            each.result(PATIENCE_S)


def under_kill(stack: Behind) -> None:
    with pytest.raises(httpx.TransportError):
        ended(stack, "Once", 3000)


@pytest.mark.parametrize(("role", "plane"), [("prefill", "tcp"), ("decode", "tcp"), ("decode", "nats")])
def test_a_frozen_worker_of_batons_costs_its_streams_little(
    tmp_path: Path, nats_server: str, role: str, plane: str
) -> None:
    (tmp_path / "mocker.yaml").write_text("decode_step_ms: 10\n")
    with Behind(tmp_path, {"DYN_REQUEST_PLANE": plane, "NATS_SERVER": nats_server}) as stack:
        stack.frontend()
        names = ("prefill", "prefill", "decode", "decode")
        workers = [stack.own(mode, yaml=tmp_path / "mocker.yaml") for mode in names]
        stack.wait_ready(2, 2)
        frozen = workers[names.index(role)]
        reads = under_streams(stack, 8, lambda: frozen.signal(signal.SIGSTOP), max_tokens=NUM_TOKENS)
        assert max(read.longest_gap_s for read in reads) < FAILOVER_S
