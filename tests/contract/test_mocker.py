"""The mocker's timing model: durations and time limits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.errors import DeadlineExceeded, InvalidRequest, WorkerLost
from baton.messages import GenerateRequest, Guided, MessageForm, Sampling, TokenChunk
from tests.clock import jumping, now_s
from tests.engine_calls import next_handoff
from tests.requests import token_request
from tests.waiting import until
from workers.engines.mocker import MockerEngine, MockerSettings
from workers.engines.script import Vocabulary
from workers.kv.transceiver import choose_transceiver


def new_engine(wire: Any = None, **settings: Any) -> MockerEngine:
    return MockerEngine(
        MockerSettings(**{"prefill_tokens_per_s": 10, "decode_step_ms": 1000, **settings}),
        model_path=Path("models/demo"),
        transceiver=wire or choose_transceiver("TCP"),
    )


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[MockerEngine]:
    """An engine with 10 prompt tokens and one step per second, which must hold nothing at the end."""
    engine = new_engine(**settings)
    await engine.start()
    try:
        yield engine
        held = ("num_running", "num_waiting", "kv_used_blocks", "kv_pinned_blocks")
        assert [getattr(engine.stats(), name) for name in held] == [0] * 4
    finally:
        await engine.stop()


def ask(num_tokens: int = 20, max_tokens: int = 5, **options: Any) -> GenerateRequest:
    return token_request(range(num_tokens), max_tokens=max_tokens, **{"deadline_s": 1000.0} | options)


async def answer(engine: MockerEngine, request: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.decode(request)]


@jumping
async def test_prompts_share_the_rate_and_are_computed_in_turn() -> None:
    async with started() as engine:
        began_s, ended_s = now_s(), dict[int, float]()

        async def prefill(number: int) -> None:
            request = msgspec.structs.replace(ask(), token_ids=list(range(100 * number, 100 * number + 20)))
            async with aclosing(engine.prefill(request)) as pinned:
                await anext(pinned)
                ended_s[number] = now_s() - began_s

        running = [asyncio.create_task(prefill(number)) for number in range(8)]
        await until(lambda: engine.stats().num_running == 8)
        running[3].cancel()  # its turn is the next one's
        await asyncio.gather(*running, return_exceptions=True)
        assert list(ended_s) == [0, 1, 2, 4, 5, 6, 7]
        assert [round(ended) for ended in ended_s.values()] == [2, 4, 6, 8, 10, 12, 14]
        await asyncio.sleep(5)  # an idle engine saves nothing up
        began_s = now_s()
        await prefill(8)
        assert round(ended_s[8]) == 2


@jumping
async def test_an_engine_that_hangs_takes_no_handoff_over(tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    async with started(hang_while=str(hang)) as engine, aclosing(engine.prefill(ask())) as replies:
        handoff = await next_handoff(replies)
        hang.touch()
        async with aclosing(engine.decode(ask(handoff=handoff))) as chunks:
            first = asyncio.ensure_future(anext(chunks))
            await asyncio.sleep(5)  # virtual time
            assert not first.done()
            assert engine.stats().num_generated_tokens == engine.stats().num_handoffs - 1 == 0
            hang.unlink()
            assert (await first).token_ids == (handoff.first_token,)


@jumping
async def test_steps_keep_time_while_an_answer_goes_on_and_a_late_one_is_not_made_up() -> None:
    async with started() as engine, aclosing(engine.decode(ask(1, 9))) as chunks:
        ended_s = list[float]()
        for pause_s in (0.0, 0.5, 0.75, 2.25, 0.0, 0.0):
            await anext(chunks)
            ended_s.append(now_s())
            await asyncio.sleep(pause_s)
        began_s = ended_s[0]
        assert [ended - began_s for ended in ended_s] == pytest.approx([0, 1, 2, 3, 6.25, 7.25])


@jumping
async def test_a_hanging_engine_keeps_deadlines_and_stops(tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    async with started(hang_while=str(hang)) as engine:
        running = asyncio.create_task(answer(engine, ask(1, 1000)))
        await until(lambda: engine.stats().num_generated_tokens > 2)
        hang.touch()
        await asyncio.sleep(2)  # the step that runs may end
        num_before, began_s = engine.stats().num_generated_tokens, now_s()
        with pytest.raises(DeadlineExceeded):
            await answer(engine, ask(deadline_s=5.0))
        assert now_s() - began_s == pytest.approx(5, abs=0.2)
        assert engine.stats().num_generated_tokens == num_before
        await engine.stop()
        with pytest.raises(WorkerLost):
            await running


FINAL = "<|channel|>final<|message|>Done.<|return|>"


@pytest.mark.parametrize(("num_more", "finish_reason"), [(1, "stop"), (0, "stop"), (-1, "length")])
@jumping
async def test_a_scripted_answer_stops_at_its_end_and_at_the_limit(
    tmp_path: Path, num_more: int, finish_reason: str
) -> None:
    (tmp_path / "script.yaml").write_text(f"- answers: ['{FINAL}']")
    script = Vocabulary(Path("models/demo/tokenizer.json")).encode(FINAL)
    call = MessageForm(headers=("<|channel|>commentary<|message|>",), end="<|call|>")
    async with started(script=str(tmp_path / "script.yaml")) as engine:
        request = ask(20, len(script) + num_more, guided=Guided(last=(call,)))
        chunks = await answer(engine, request)
        assert tuple(chunk.token_ids[0] for chunk in chunks) == script[: len(script) + num_more]
        assert chunks[-1].finish_reason == finish_reason


@jumping
async def test_a_form_that_its_answers_do_not_happen_to_have_is_refused_by_its_field() -> None:
    call = MessageForm(headers=("<|channel|>commentary<|message|>",), end="<|call|>", param="tool_choice")
    final = MessageForm(headers=("<|channel|>final<|message|>",), end="<|return|>")
    schema = msgspec.structs.replace(final, grammar="{}", syntax="json_schema", param="response_format")
    async with started() as engine:
        with pytest.raises(InvalidRequest, match="`tool_choice` cannot be enforced"):
            await answer(engine, ask(guided=Guided(last=(call,))))
        with pytest.raises(InvalidRequest, match="`response_format` cannot be enforced") as refused:
            await anext(engine.prefill(ask(guided=Guided(last=(schema,)))))
        assert refused.value.param == "response_format"
        assert len(await answer(engine, ask(guided=Guided(last=(call, final))))) == 5
        scored = msgspec.structs.replace(ask(), sampling=Sampling(max_tokens=1, seed=0, prompt_logprobs=0))
        with pytest.raises(InvalidRequest, match="no log probabilities of the prompt"):
            await answer(engine, scored)
