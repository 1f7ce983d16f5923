"""The trtllm engine against TensorRT-LLM's known traps."""

import asyncio
import dataclasses
import re
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tensorrt_llm
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.traps import sprung

from baton.errors import DeadlineExceeded, EngineFailure, HandoffFailed, InvalidRequest, WorkerLost
from baton.frames import FROM_CALLER, FROM_WORKER, Next, Open
from baton.messages import NO_TOKEN, GenerateRequest, KvHandoff, after_handoff
from tests.engine_calls import ask, handed_over, left_handoff, next_handoff, tokens
from tests.trtllm_engine import KV_TIMEOUT_S, NO_WATCHDOG, executor, new_engine, started
from tests.waiting import PATIENCE_S, scaled, until
from workers.engines.library.engine import opened
from workers.engines.trtllm.adapter import generation_params, travelling
from workers.engines.trtllm.library import load_library
from workers.engines.trtllm.watchdog import Patience, Watchdog


def lost(handoff: KvHandoff) -> KvHandoff:
    """A handoff whose worker has died."""
    state = opened(handoff, handoff.num_prompt_tokens)
    inner = msgspec.msgpack.decode(state.params["opaque_state"], type=KvHandoff)
    state.params["opaque_state"] = msgspec.msgpack.encode(
        msgspec.structs.replace(
            inner, engine_state=re.sub(rb"127\.0\.0\.1", b"127.0.0.9", inner.engine_state)
        )
    )
    return msgspec.structs.replace(handoff, engine_state=state.sealed())


async def test_decode_that_is_given_up_during_its_transfer_is_not_aborted(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        handoff = lost(await left_handoff(engine, ask()))
        answer = asyncio.create_task(tokens(engine.decode(ask(handoff=handoff))))
        await until(lambda: engine.stats().num_running == 1)
        answer.cancel()
        await asyncio.wait([answer])
        assert engine.stats().num_running == 1  # its slot is taken until the transfer ends
        await until(lambda: engine.stats().num_running == 0)
        assert len(await tokens(engine.decode(ask()))) == 12


async def test_a_handoff_whose_source_is_gone_fails_when_the_kv_timeout_is_over(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        handoff = lost(await left_handoff(engine, ask()))
        began = time.monotonic()
        with pytest.raises(HandoffFailed, match="the KV did not arrive"):
            await tokens(engine.decode(ask(handoff=handoff)))
        assert time.monotonic() - began >= KV_TIMEOUT_S
        assert len(await tokens(engine.decode(ask()))) == 12


async def test_a_deadline_below_the_kv_timeout_ends_the_request_and_leaves_the_transfer_alone(
    checkpoint: Path,
) -> None:
    async with started(checkpoint) as engine:
        handoff = lost(await left_handoff(engine, ask()))
        began = time.monotonic()
        hurried = ask(handoff=handoff, deadline_s=KV_TIMEOUT_S / 5)
        with pytest.raises(DeadlineExceeded, match="The request exceeded its deadline"):
            await tokens(engine.decode(hurried))
        assert engine.stats().num_running == 1  # an abort would have killed the engine
        await until(lambda: engine.stats().num_running == 0)
        assert time.monotonic() - began >= KV_TIMEOUT_S
        assert len(await tokens(engine.decode(ask()))) == 12


async def test_a_deadline_below_the_kv_timeout_ends_the_prefills_pin(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        replies = engine.prefill(ask(deadline_s=KV_TIMEOUT_S / 2))
        handoff = await next_handoff(replies)
        assert handoff.ttl_s < KV_TIMEOUT_S / 2
        with pytest.raises(HandoffFailed, match="no decode worker took the KV"):
            await anext(replies)
        stats = engine.stats()
        assert (stats.num_handoffs, stats.num_handoffs_expired, stats.kv_pinned_blocks) == (1, 1, 0)
        assert len(await tokens(engine.decode(ask()))) == 12


async def test_a_prefill_that_is_closed_leaves_its_pin_to_the_timeout(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        handoff = await left_handoff(engine, ask())
        late = ask(handoff=handoff)
        assert await tokens(engine.decode(late)) == await tokens(engine.decode(ask()))


async def test_length_without_parameters_is_a_failed_handoff(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        with sprung(gives_no_params=True), pytest.raises(HandoffFailed):
            await next_handoff(engine.prefill(ask()))


class Wordless(tensorrt_llm.LLM):  # type: ignore[misc]  # the double is not typed
    """Its context responses have no token."""

    def generate_async(self, *args: Any, **options: Any) -> Any:
        """See the class."""
        result = super().generate_async(*args, **options)
        put = result.put

        def without_token(response: Any) -> None:
            is_context = getattr(response, "disaggregated_params", None) is not None
            put(dataclasses.replace(response, token_ids=[]) if is_context else response)

        result.put = without_token
        return result


def over_the_wire(handoff: KvHandoff) -> GenerateRequest:
    """What decode gets, after the frontend has got the handoff."""
    _, (replied,) = FROM_WORKER.decode(msgspec.msgpack.encode((0, [Next(1, handoff)])))
    assert isinstance(replied, Next)
    assert isinstance(replied.reply, KvHandoff)
    request = after_handoff(ask(), replied.reply)
    _, (opened,) = FROM_CALLER.decode(msgspec.msgpack.encode((0, [Open(1, request)])))
    assert isinstance(opened, Open)
    assert isinstance(opened.request, GenerateRequest)
    return opened.request


async def test_a_context_response_without_its_token_is_a_handoff_whose_token_decode_tells(
    checkpoint: Path,
) -> None:
    async with started(checkpoint, classes={"llm": Wordless}) as engine:
        async with handed_over(engine, ask()) as handoff:
            answer = await tokens(engine.decode(over_the_wire(handoff)))
        assert handoff.first_token == NO_TOKEN
        assert answer == await tokens(engine.decode(ask()))


async def test_a_prompt_longer_than_the_transceivers_buffer_is_refused_with_both_numbers(
    checkpoint: Path,
) -> None:
    async with started(checkpoint) as engine:
        async with aclosing(engine.prefill(ask(256))) as replies:
            await next_handoff(replies)
        with pytest.raises(InvalidRequest, match="300 tokens; the KV of at most 256"):
            await next_handoff(engine.prefill(ask(300)))
        assert len(await tokens(engine.decode(ask(300)))) == 12


async def test_tokens_of_several_steps_come_in_one_chunk(checkpoint: Path) -> None:
    async with started(checkpoint, stream_interval=5) as engine:
        sizes = [len(chunk.token_ids) async for chunk in engine.decode(ask())]
        assert sizes == [1, 5, 5, 1]
        assert engine.stats().num_generated_tokens == 12


async def test_a_dead_engine_ends_every_request_and_takes_no_other(checkpoint: Path) -> None:
    with sprung(dies_after=8):
        engine = new_engine(checkpoint, patience=NO_WATCHDOG)
        await engine.start()
    try:
        answers = [tokens(engine.decode(ask(max_tokens=100))) for _ in range(2)]
        for outcome in await asyncio.gather(*answers, return_exceptions=True):
            assert isinstance(outcome, WorkerLost)
        async with asyncio.timeout(PATIENCE_S):
            assert "injected death" in await engine.failed()
        with pytest.raises(WorkerLost, match="injected death"):
            await tokens(engine.decode(ask()))
    finally:
        await engine.stop()


async def test_a_recorded_fatal_error_is_noticed_without_a_request(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        executor(engine).die("out of the blue")
        async with asyncio.timeout(PATIENCE_S):
            assert "out of the blue" in await engine.failed()


async def test_a_frozen_event_loop_ends_the_process() -> None:
    left: list[int] = []
    patience = Patience(poll_s=0.01, health_s=scaled(2.0))
    watching = asyncio.create_task(Watchdog(object(), leave=left.append, patience=patience).broken())
    await asyncio.sleep(0.05)  # several watchdog checks
    assert left == []
    while not left:  # no await, so the loop does not run
        time.sleep(0.01)  # noqa: ASYNC251  that is the point
    watching.cancel()
    assert set(left) == {1}


def test_what_a_handoff_carries_survives_the_wire() -> None:
    lib = load_library()
    params = lib.disaggregated_params(
        request_type="context_only",
        first_gen_log_probs=[{7: lib.logprob(-0.5, 1)}],
        first_gen_logits=object(),
        opaque_state=b"\x00\xff",
    )
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(travelling(params)))
    built = generation_params(travelled, lib)
    assert (built.request_type, built.opaque_state) == ("generation_only", b"\x00\xff")
    assert built.first_gen_log_probs == [{7: lib.logprob(-0.5, 1)}]


async def test_a_request_error_after_the_first_token_leaves_the_engine_alive(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        answer = engine.decode(ask(max_tokens=100))
        await anext(answer)
        (job,) = executor(engine)._jobs.values()  # noqa: SLF001  tests only
        job.result.put(RequestError("Request 1 timed out"))
        with pytest.raises(EngineFailure, match="on this request: Request 1 timed out"):
            await tokens(answer)
        assert len(await tokens(engine.decode(ask()))) == 12


def test_a_handoff_that_the_build_refuses_is_a_failed_one() -> None:
    with pytest.raises(HandoffFailed):
        generation_params({"first_gen_log_probs": [7]}, load_library())
