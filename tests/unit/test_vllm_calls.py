"""Ending a call inside vLLM from outside, at an awkward moment."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from baton.errors import DeadlineExceeded, HandoffFailed, WorkerLost
from baton.messages import GenerateRequest, Sampling
from workers.engines.vllm.calls import Call
from workers.engines.vllm.library import Result


async def _nothing() -> AsyncGenerator[Result, None]:
    return
    yield


def test_a_call_that_is_being_ended_may_be_ended_again() -> None:
    """Two steps may both count failed pulls; vLLM dies of an error that a stat logger raises."""

    async def main() -> None:
        request = GenerateRequest(
            request_id="r", model="m", token_ids=[1], sampling=Sampling(max_tokens=1, seed=0), deadline_s=60
        )
        call = Call("r", request, asyncio.get_running_loop().time() + 60, _nothing())
        step = asyncio.create_task(call.wait(asyncio.Event().wait(), call.deadline, DeadlineExceeded("late")))
        await asyncio.sleep(0)  # the step waits
        call.end_with(HandoffFailed("the first"))
        await asyncio.sleep(0)  # the step's timeout has started
        call.end_with(WorkerLost("the second"))
        with pytest.raises(WorkerLost):
            await step

    asyncio.run(main())
