"""Engines that cannot go on in the middle of an answer make it again; the client gets no token twice."""

from collections.abc import AsyncGenerator

import pytest

from baton.errors import EngineFailure, NotResumable, WorkerLost
from baton.messages import GenerateRequest, KvHandoff, Reply, TokenChunk, TokenLogprob, Usage
from tests.scripted_workers import (
    Script,
    ScriptedWorkers,
    failing,
    generate,
    generator_over,
    hand_off,
    request,
)

WHOLE = [10, 11, 12, 13]


def from_the_beginning(*steps: int, tokens: tuple[int, ...] = (10, 11, 12, 13)) -> Script:
    """An engine that refuses to go on, and makes `tokens` in steps of so many."""

    async def script(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        if asked.num_generated:
            raise NotResumable("not in the middle")
        position = 0
        for step in steps:
            ids, position = tokens[position : position + step], position + step
            is_last = position == len(tokens)
            logprobs = tuple(TokenLogprob(token_id, -0.5, ()) for token_id in ids)
            yield TokenChunk(
                ids, "stop" if is_last else None, Usage(2, 0, 4) if is_last else None, logprobs=logprobs
            )

    return script


@pytest.mark.parametrize("steps", [(1, 1, 1, 1), (2, 2), (3, 1), (1, 3), (4,)])
@pytest.mark.parametrize("num_before", [1, 2, 3])
async def test_an_answer_is_made_again_and_goes_on_where_the_client_is(
    steps: tuple[int, ...], num_before: int
) -> None:
    lost = failing(WorkerLost("gone"), after=num_before)
    fleet = ScriptedWorkers(d1=lost, d2=from_the_beginning(*steps))
    chunks: list[TokenChunk] = []
    async with generator_over(fleet) as generator:
        chunks.extend([chunk async for chunk in generator.generate(request())])
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == WHOLE
    assert all(chunk.token_ids for chunk in chunks)
    assert (chunks[-1].finish_reason, chunks[-1].usage) == ("stop", Usage(2, 0, 4))
    for chunk in chunks[num_before:]:
        assert tuple(each.token_id for each in chunk.logprobs or ()) == chunk.token_ids
    assert fleet.asked == ["d1", "d2", "d2"]
    asked = fleet.calls[-1][1]
    assert (asked.token_ids, asked.num_generated, asked.is_retry) == ([1, 2], 0, True)


async def test_what_is_lost_again_while_it_is_made_again_is_made_once_more() -> None:
    tries = iter([failing(WorkerLost("gone"), after=3), failing(WorkerLost("gone"), after=1)])

    def dying(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        return next(tries)(asked) if not asked.num_generated else from_the_beginning()(asked)

    fleet = ScriptedWorkers(d1=dying, d2=dying, d3=from_the_beginning(2, 2))
    assert await generate(fleet) == WHOLE


async def test_a_first_chunk_of_prefill_is_not_sent_twice() -> None:
    async def with_first(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        if asked.num_generated:
            raise NotResumable("not in the middle")
        async for handoff in hand_off(asked):
            assert isinstance(handoff, KvHandoff)
            yield KvHandoff(
                worker_id="p",
                incarnation="p",
                first_token=10,
                num_prompt_tokens=2,
                ttl_s=9,
                engine_state=b"kv",
                first_chunk=TokenChunk((10,)),
            )

    async def rest(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        for token_id in (11, 12, 13):
            yield TokenChunk((token_id,), "length" if token_id == 13 else None)

    async def lost(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        yield TokenChunk((11,))
        raise WorkerLost("gone")

    fleet = ScriptedWorkers(p1=with_first, d1=lost, d2=rest)
    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["p1", "d1", "p1", "p1", "d2"]


@pytest.mark.parametrize(
    "again", [from_the_beginning(4, tokens=(10, 99, 12, 13)), from_the_beginning(1, tokens=(10,))]
)
async def test_another_answer_than_before_ends_with_an_error_and_no_other_token(again: Script) -> None:
    fleet = ScriptedWorkers(d1=failing(WorkerLost("gone"), after=2), d2=again)
    got: list[int] = []

    async def main() -> None:
        async with generator_over(fleet) as generator:
            async for chunk in generator.generate(request()):
                got.extend(chunk.token_ids)

    with pytest.raises(EngineFailure, match="send the request again"):
        await main()
    assert got == [10, 11]


async def test_an_engine_that_refuses_the_beginning_too_ends_the_request() -> None:
    fleet = ScriptedWorkers(d1=failing(WorkerLost("gone"), after=2), d2=failing(NotResumable("never")))
    with pytest.raises(NotResumable):
        await generate(fleet)
    assert fleet.asked == ["d1", "d2", "d2"]
