"""The trtllm engine when TensorRT-LLM hangs, dies, is another release, or rejects a request."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.traps import sprung

from baton.errors import InvalidRequest, WorkerLost
from tests.engine_calls import ask, handed_over, next_handoff, tokens
from tests.trtllm_engine import CONFIG, executor, new_engine, started
from tests.waiting import PATIENCE_S, scaled, until
from workers.engines.library.engine import LibraryEngine
from workers.engines.trtllm.library import load_library
from workers.engines.trtllm.watchdog import Patience
from workers.settings import SettingsError

FOREVER_S = 3600.0


def num_jobs(engine: LibraryEngine) -> int:
    """Requests inside the double."""
    return len(executor(engine)._jobs)  # noqa: SLF001  tests only


async def served(engine: LibraryEngine) -> bool:
    """Whether it still answers."""
    return len(await tokens(engine.decode(ask()))) == 12


async def test_a_prefill_that_is_closed_before_its_handoff_is_aborted(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        await until(lambda: num_jobs(engine) == 0)  # the warm-up has ended
        with sprung(prefill_s_a_token=FOREVER_S):
            prefilling = asyncio.create_task(next_handoff(engine.prefill(ask())))
            await until(lambda: num_jobs(engine) == 1)
            prefilling.cancel()
            await asyncio.wait([prefilling])
            assert engine.stats().num_running == 0
            await until(lambda: num_jobs(engine) == 0)
        assert await served(engine)


async def test_a_prefill_closed_as_its_response_arrives_is_harmless(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        await until(lambda: num_jobs(engine) == 0)  # the warm-up has ended
        prefilling = asyncio.create_task(next_handoff(engine.prefill(ask())))
        await until(lambda: num_jobs(engine) == 1, pause_s=0)
        (job,) = executor(engine)._jobs.values()  # noqa: SLF001  tests only
        while not job.is_pinned and not job.task.done():
            pass  # the loop does not run, so the response is not read
        assert job.is_pinned
        prefilling.cancel()
        await asyncio.wait([prefilling])
        await until(lambda: num_jobs(engine) == 0)  # by the KV timeout: the abort was refused
        assert await served(engine)


async def test_a_hanging_health_check_delays_nothing_and_is_a_failure(checkpoint: Path) -> None:
    patience = Patience(poll_s=0.01, health_s=scaled(3.0))
    async with started(checkpoint, patience=patience) as engine:
        with sprung(health_hangs=True):
            assert await served(engine)
            async with asyncio.timeout(PATIENCE_S):
                assert "health check did not end within" in await engine.failed()


async def test_a_shutdown_that_hangs_ends_the_process(checkpoint: Path) -> None:
    left: list[int] = []
    engine = new_engine(checkpoint, leave=left.append, patience=Patience(shut_down_s=0.05))
    await engine.start()
    with sprung(shutdown_hangs=True):
        stopping = asyncio.create_task(engine.stop())
        await until(lambda: left == [1])
    await stopping


async def test_a_context_that_the_kv_cache_cannot_hold_is_not_announced(checkpoint: Path) -> None:
    engine = new_engine(checkpoint, kv_cache_config={"tokens_per_block": 8, "max_tokens": 128})
    try:
        assert (await engine.start()).context_length == 128
        with pytest.raises(InvalidRequest, match="128 tokens; with a context length of 128"):
            await tokens(engine.decode(ask(128)))
        assert len(await tokens(engine.decode(ask(120)))) == 8
    finally:
        await engine.stop()


async def test_with_attention_dp_capacity_and_use_are_those_of_all_ranks(checkpoint: Path) -> None:
    ranks = {"enable_attention_dp": True, "tensor_parallel_size": 4}
    cache = {"tokens_per_block": 8, "max_tokens": 256}
    async with started(checkpoint, **ranks, kv_cache_config=cache) as engine:
        answers = [engine.decode(ask(200, max_tokens=50)) for _ in range(4)]
        for answer in answers:
            await anext(answer)
        stats = engine.stats()
        assert stats.kv_blocks == 4 * 256 // 8
        assert stats.kv_blocks / 2 < stats.kv_used_blocks <= stats.kv_blocks
        for answer in answers:
            await answer.aclose()


async def test_with_attention_dp_no_prompt_is_taken_for_a_dummy_request(checkpoint: Path) -> None:
    ranks = {"enable_attention_dp": True, "tensor_parallel_size": 4}
    async with started(checkpoint, **ranks) as engine:
        ones = ask([1] * 9)
        assert len(await tokens(engine.decode(ones))) == 12
        async with aclosing(engine.prefill(ones)) as replies:
            handed = msgspec.structs.replace(ones, handoff=await next_handoff(replies))
            assert len(await tokens(engine.decode(handed))) == 12


def test_a_release_that_was_not_tried_serves_aggregated_only_and_an_old_one_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with sprung(build="1.2.1"), pytest.raises(SettingsError, match=r"1\.2\.1.* is too old; install"):
        load_library()
    with sprung(build="1.5.0"):
        assert load_library("agg").version == "1.5.0"
        assert "tested with 1.3 or 1.4" in caplog.text
        with pytest.raises(SettingsError, match=r"TensorRT-LLM 1\.5\.0: .* --disaggregation-mode agg"):
            load_library("decode")


class OtherLLM(LLM):  # type: ignore[misc]  # the double is not typed
    """A release whose `generate_async` accepts a keyword that it then fails on."""

    def generate_async(self, *args: Any, **options: Any) -> Any:
        """See the class."""
        if "streaming" in options:
            raise TypeError("submit() got an unexpected keyword argument 'streaming'")
        return super().generate_async(*args, **options)


async def test_a_release_with_another_signature_ends_the_worker(checkpoint: Path) -> None:
    async with started(checkpoint, classes={"llm": OtherLLM}) as engine:
        with pytest.raises(WorkerLost, match="unexpected keyword argument 'streaming'"):
            await tokens(engine.decode(ask()))
        async with asyncio.timeout(PATIENCE_S):
            assert "TypeError" in await engine.failed()


async def test_a_request_that_cannot_be_converted_ends_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("odd schema")

    async with started(checkpoint) as engine:
        with monkeypatch.context() as patched:
            patched.setattr("workers.engines.trtllm.adapter.sampling_params", fail)
            with pytest.raises(KeyError):
                await tokens(engine.decode(ask()))
        assert await served(engine)


@pytest.mark.parametrize(
    ("build", "backend", "kind"),
    [
        ("1.3.0rc29", "NIXL", "nixl-python-v2"),
        ("1.4.0rc1", "NIXL", "nixl-python-v2"),
        ("1.4.0rc1", "UCX", "ucx-cpp-v1"),
    ],
)
async def test_an_answer_is_the_same_apart(checkpoint: Path, build: str, backend: str, kind: str) -> None:
    wire = CONFIG["cache_transceiver_config"] | {"backend": backend}
    with sprung(build=build):
        engine = new_engine(checkpoint, cache_transceiver_config=wire)
        try:
            assert (await engine.start()).kv_transfer == f"{kind} (tp 1)"
            request = ask(logprobs=2)
            expected = [chunk async for chunk in engine.decode(request)]
            async with handed_over(engine, request) as handoff:
                handed = msgspec.structs.replace(request, handoff=handoff)
                answer = [chunk async for chunk in engine.decode(handed)]
            assert [c.token_ids for c in answer] == [c.token_ids for c in expected]
            logged = [tuple(entry.token_id for entry in c.logprobs or ()) for c in answer]
            assert logged == [c.token_ids for c in expected]
        finally:
            await engine.stop()
