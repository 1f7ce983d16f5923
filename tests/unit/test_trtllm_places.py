"""The trtllm engine's places: who gets one, when it is free again, and how an answer ends."""

import dataclasses
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from tensorrt_llm.executor.result import Response
from tensorrt_llm.llmapi.llm import LLM

from baton.errors import Overloaded
from tests.engine_calls import next_handoff
from tests.tiny_gpt_oss import write_checkpoint
from tests.trtllm_engine import NO_WATCHDOG, ask, started


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


class Late(LLM):  # type: ignore[misc]  # the double is not typed
    """Tells the end of an answer after its last token."""

    def generate_async(self, *args: Any, **options: Any) -> Any:
        """See the class."""
        result = super().generate_async(*args, **options)
        put = result.put

        def in_two(response: Response) -> None:
            if response.finish_reason:
                put(dataclasses.replace(response, finish_reason=None))
                response = dataclasses.replace(response, token_ids=[])
            put(response)

        result.put = in_two
        return result


async def test_an_end_without_tokens_is_told(checkpoint: Path) -> None:
    async with started(checkpoint, classes={"llm": Late}) as engine:
        answer = [chunk async for chunk in engine.decode(ask())]
    assert sum(len(chunk.token_ids) for chunk in answer) == 12
    assert (answer[-1].token_ids, answer[-1].finish_reason) == ((), "length")
    assert answer[-1].usage is not None


async def test_an_answer_that_is_closed_has_left_the_engine_at_once(checkpoint: Path) -> None:
    async with started(checkpoint, patience=NO_WATCHDOG) as engine:
        for answer in (engine.decode(ask()), engine.prefill(ask(max_tokens=1))):
            await anext(answer)
            assert engine.stats().num_running == 1
            await answer.aclose()
            assert engine.stats().num_running == 0


async def test_a_full_worker_takes_neither_prompts_nor_answers_and_says_when_to_come_back(
    checkpoint: Path,
) -> None:
    async with started(checkpoint, max_batch_size=1, max_queue_size=0, patience=NO_WATCHDOG) as engine:
        async with aclosing(engine.decode(ask())) as answer:
            await anext(answer)
            for other in (engine.decode(ask()), engine.prefill(ask())):
                with pytest.raises(Overloaded) as refused:
                    await anext(other)
                assert (refused.value.retry_after_s or 0) > 0
        async with aclosing(engine.prefill(ask())) as replies:
            await next_handoff(replies)
