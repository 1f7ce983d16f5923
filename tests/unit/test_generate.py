"""Orchestration: prefill, handoff, decode, and what happens when a worker is lost on the way."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.errors import (
    BatonError,
    BrokerLost,
    DeadlineExceeded,
    EngineFailure,
    HandoffFailed,
    HandoffStalled,
    InvalidRequest,
    NotReady,
    NotResumable,
    NoWorkers,
    Overloaded,
    WorkerLost,
    WorkerUnreached,
)
from baton.messages import GenerateRequest, PrefillFirst, Reply, TokenChunk, TokenLogprob, Usage, WorkerInfo
from baton.pace import TICK_S
from frontend.routing.admission import RoutingSettings
from frontend.routing.fleet import Fleet
from frontend.routing.generate import Generator
from tests.clock import jumping, now_s, run_jumping
from tests.generators import none_abandoned, running
from tests.scripted_workers import (
    HANDOFF,
    Script,
    ScriptedWorkers,
    answer,
    failing,
    generate,
    generator_over,
    hand_off,
    hand_off_with_first,
    hang,
    in_turn,
    request,
    script,
    token_ids_of,
)
from tests.waiting import until

WHOLE = [10, 11, 12, 13]
DEMO = Path("models/demo")
NUM_IDS = 3072  # of the demo model


def lacking(num_tokens: int, *, is_busy: bool = False) -> Script:
    """A decode worker that lacks so much of the prompt."""

    async def script(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        limit = sent.local_prefill_tokens
        if sent.handoff is None and limit is not None and (is_busy or num_tokens > limit):
            yield PrefillFirst(num_tokens, is_busy)
            return
        async for chunk in answer(sent):
            yield chunk

    return script


async def ended(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
    async for reply in failing((WorkerLost if now_s() < TICK_S else WorkerUnreached)("gone"))(sent):
        yield reply


LOST, EXPIRED = failing(WorkerLost("gone")), failing(HandoffFailed("expired"))
FAILURES: dict[str, tuple[dict[str, Script], str]] = {
    "prefill, then decode": ({"p1": hand_off, "d1": answer}, "p1 d1"),
    "no prefill worker": ({"d1": answer}, "d1"),
    "lost prefill worker": ({"p1": LOST, "p2": hand_off, "d1": answer}, "p1 p2 d1"),
    "no handoff": ({"p1": script(), "p2": hand_off, "d1": answer}, "p1 p2 d1"),
    "every prefill worker lost": ({"p1": LOST, "d1": answer}, "p1 d1"),
    "failed handoff": ({"p1": hand_off, "p2": hand_off, "d1": in_turn(EXPIRED, answer)}, "p1 d1 p2 d1"),
    "each failed handoff excludes its prefill worker":
        ({"p1": hand_off, "p2": hand_off, "d1": in_turn(EXPIRED, EXPIRED, answer)}, "p1 d1 p2 d1 d1"),
    "incomplete stream": ({"d1": script(TokenChunk((10,))), "d2": answer}, "d1 d2"),
    "fourth worker": ({"d1": LOST, "d2": LOST, "d3": LOST, "d4": answer}, "d1 d3 d2 d4"),
    "workers that end at once":
        ({"d0": ended, "d1": ended, "d2": ended, "d3": ended, "d4": ended, "d5": answer},
         "d0 d2 d4 d1 d3 d5"),
    "full worker": ({"d1": failing(Overloaded("full")), "d2": answer}, "d1 d2"),
    "prefill worker without a pair": ({"p1x": hand_off, "d1": answer}, "d1"),
    "decode of the pair": ({"p1x": hand_off, "d1": EXPIRED, "d2x": answer}, "p1x d2x"),
    "after prefill's token": ({"p1": hand_off_with_first, "d1": LOST, "d2": answer}, "p1 d1 p1 d2"),
    "prefill worker lost before the KV has moved":
        ({"p1": script(HANDOFF, WorkerLost("gone")), "p2": hand_off, "d1": in_turn(hang, answer)},
         "p1 d1 p2 d1"),
}  # fmt: skip


@pytest.mark.parametrize(("scripts", "called"), FAILURES.values(), ids=FAILURES)
@jumping
async def test_an_answer_is_whole_whichever_workers_fail(scripts: dict[str, Script], called: str) -> None:
    fleet = ScriptedWorkers(**scripts)
    assert await generate(fleet) == WHOLE
    assert fleet.called == called.split()
    assert now_s() < 1  # nothing waited for a limit


LOCAL: dict[str, tuple[dict[str, Script], str]] = {
    "cached": ({"p1": hand_off, "d1": lacking(50)}, "d1"),
    "decode worker lost": ({"p1": hand_off, "d1": LOST, "d2": lacking(1)}, "d1 d2"),
    "failed handoff":
        ({"p1": hand_off, "p2": hand_off, "d1": in_turn(lacking(51), EXPIRED, lacking(51), answer)},
         "d1 p1 d1 d1 p2 d1"),
    "of the pair": ({"p1x": hand_off, "p2": hand_off, "d1": lacking(51), "d2x": lacking(51)}, "d1 p2 d1"),
}  # fmt: skip


@pytest.mark.parametrize(("scripts", "called"), LOCAL.values(), ids=LOCAL)
async def test_with_local_prefill_decode_is_called_first(scripts: dict[str, Script], called: str) -> None:
    fleet = ScriptedWorkers(**scripts)
    assert await generate(fleet, local_prefill_tokens=50) == WHOLE
    assert fleet.called == called.split()


async def test_prefills_first_token_is_sent_before_decode_is_called() -> None:
    fleet = ScriptedWorkers(p1=hand_off_with_first, d1=answer)
    async with generator_over(fleet) as generator, aclosing(generator.generate(request())) as chunks:
        assert (await anext(chunks)).token_ids == (10,)
        assert fleet.called == ["p1"]
        assert [token async for chunk in chunks for token in chunk.token_ids] == WHOLE[1:]
    sent = fleet.calls[1][1]
    assert (sent.token_ids[-1], sent.num_generated) == (10, 1)
    assert sent.handoff is not None


@pytest.mark.parametrize(
    ("scripts", "raised", "num_calls"),
    [
        ({"p1": hand_off}, NoWorkers, 0),
        ({"d1": failing(WorkerLost("gone"), after=1)}, WorkerLost, 1),
        ({"d1": failing(Overloaded("full"))}, Overloaded, 1),
        ({"p1": failing(InvalidRequest("bad")), "d1": answer}, InvalidRequest, 1),
        ({"p1": hand_off, "d1": failing(DeadlineExceeded("over"))}, DeadlineExceeded, 2),
        ({f"d{i}": LOST for i in range(9)}, WorkerLost, 4),
        ({"d1": failing(WorkerLost("gone"), after=2), "d2": failing(NotResumable("never"))}, NotResumable, 3),
    ],
)
async def test_what_cannot_be_repaired_ends_with_its_name(
    scripts: dict[str, Script], raised: type[BatonError], num_calls: int
) -> None:
    fleet = ScriptedWorkers(**scripts)
    with pytest.raises(raised):
        await generate(fleet)
    assert len(fleet.calls) == num_calls


@pytest.mark.parametrize(
    ("prefill", "decode", "local_prefill_tokens", "open_calls"),
    [(hang, answer, 0, ["p1"]), (hand_off, hang, 0, ["p1", "d1"]), (hand_off, hang, 50, ["d1"])],
)
async def test_leaving_closes_the_calls_to_both_workers_in_any_phase(
    prefill: Script, decode: Script, local_prefill_tokens: int, open_calls: list[str]
) -> None:
    fleet = ScriptedWorkers(p1=prefill, d1=decode)
    with none_abandoned():
        over = generator_over(fleet, local_prefill_tokens=local_prefill_tokens)
        async with over as generator, aclosing(generator.generate(request())) as chunks:
            first = asyncio.ensure_future(anext(chunks))
            await until(lambda: fleet.open == open_calls)
            first.cancel()
            await asyncio.wait([first])
        assert fleet.open == []


@jumping
async def test_a_request_whose_time_is_over_is_not_tried_again() -> None:
    async def lost_too_late(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        await asyncio.sleep(sent.deadline_s + 0.01)  # more than its time
        async for reply in LOST(sent):
            yield reply

    fleet = ScriptedWorkers(d1=lost_too_late, d2=answer)
    with pytest.raises(DeadlineExceeded):
        await generate(fleet)
    assert fleet.called == ["d1"]


@jumping
async def test_no_worker_is_called_after_a_pause_that_outlasts_the_time() -> None:
    fleet = ScriptedWorkers(d1=LOST, d2=answer, d3=LOST)  # d2 is the last one
    with pytest.raises(DeadlineExceeded):
        await generate(fleet, deadline_s=TICK_S)
    assert fleet.called == ["d1", "d3"]


@pytest.mark.parametrize(("is_busy", "reason"), [(False, "long"), (True, "busy")])
async def test_what_it_lacks_more_is_prefilled_and_handed_to_the_same_worker(
    is_busy: bool, reason: str
) -> None:
    decodes = {name: lacking(51, is_busy=is_busy) for name in ("d1", "d2", "d3")}
    fleet = ScriptedWorkers(p1=hand_off, **decodes)
    async with generator_over(fleet, local_prefill_tokens=50) as generator:
        for _ in range(2):
            assert await token_ids_of(generator) == WHOLE
    assert fleet.called == ["d1", "p1", "d1", "d2", "p1", "d2"]
    assert [call.handoff is not None for _, call in fleet.calls] == [False, False, True] * 2
    assert fleet.metrics.of("prefills", "prefill", reason).value == fleet.metrics.total("prefills") == 2


def handing(**changes: Any) -> Script:
    return script(msgspec.structs.replace(HANDOFF, **changes), None)


@pytest.mark.parametrize(
    "scripts",
    [
        {"d1": script(TokenChunk((10, NUM_IDS))), "d2": answer},
        {"p1": handing(first_token=NUM_IDS), "p2": hand_off, "d1": answer},
        {"p1": handing(first_chunk=TokenChunk((NUM_IDS,))), "p2": hand_off, "d1": answer},
    ],
    ids=["decode", "prefill", "prefill's first chunk"],
)
async def test_a_worker_that_sends_unknown_tokens_is_refused_and_the_answer_is_right(
    scripts: dict[str, Script],
) -> None:
    fleet, name = ScriptedWorkers(**scripts), next(iter(scripts))
    live = Fleet(fleet, fleet, model_path=DEMO)
    async with live.keep_current():
        await live.synced.wait()
        generator = Generator(fleet, live, RoutingSettings(wait_for_worker_s=0), fleet.metrics)
        for _ in range(3):
            assert await token_ids_of(generator) == WHOLE
        assert fleet.called.count(name) == 1
        assert [reason.partition(":")[0] for reason in live.health().refused] == [name]


async def test_a_short_prompt_joins_decode_only_while_prefill_keeps_others_waiting() -> None:
    released = asyncio.Event()

    async def slow(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        await released.wait()
        yield HANDOFF
        await asyncio.Event().wait()

    fleet = ScriptedWorkers(p1=slow, d1=lacking(50))
    async with generator_over(fleet, local_prefill_tokens=50, local_prefill_after_s=0.01) as generator:
        first = asyncio.create_task(token_ids_of(generator))
        await until(lambda: fleet.called == ["p1"])
        await asyncio.sleep(0.02)  # longer than the limit
        assert await token_ids_of(generator) == WHOLE
        assert fleet.called == ["p1", "d1"]
        released.set()
        assert await first == WHOLE
        assert await token_ids_of(generator) == WHOLE
        assert fleet.called == ["p1", "d1", "d1", "p1", "d1"]
    of, total = fleet.metrics.of, fleet.metrics.total
    assert (of("prefills", "prefill", "free").value, total("prefills")) == (2, 3), "one is cached at decode"


@pytest.mark.parametrize(
    ("prefill", "decode", "is_let_in"),
    [
        (hand_off, hang, False),
        (hand_off, script(TokenChunk((10,)), None), True),
        (hand_off_with_first, hang, True),
    ],
)
@jumping
async def test_the_next_request_goes_to_prefill_when_this_one_has_a_token(
    prefill: Script, decode: Script, is_let_in: bool
) -> None:
    fleet = ScriptedWorkers(p1=prefill, d1=decode, d2=decode)
    fleet.max_batch_size = 1
    async with generator_over(fleet) as generator, running(*(token_ids_of(generator, 600) for _ in range(2))):
        await asyncio.sleep(5)  # virtual time
        assert fleet.called.count("p1") == 1 + is_let_in


@pytest.mark.parametrize(
    ("error", "called_later"),
    [(HandoffFailed("expired"), ["p1", "d1"]), (HandoffStalled("nothing came"), ["d1"])],
)
async def test_only_a_pair_between_which_nothing_moves_is_left_out(
    error: HandoffFailed, called_later: list[str]
) -> None:
    fleet = ScriptedWorkers(p1=hand_off, d1=in_turn(failing(error), answer))
    async with generator_over(fleet) as generator:
        for _ in range(2):
            assert [chunk async for chunk in generator.generate(request())]
    assert fleet.called == ["p1", "d1", "d1", *called_later]


@jumping
async def test_each_model_has_a_queue_of_its_own() -> None:
    class TwoModels(ScriptedWorkers):
        async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
            async for live in super().watch():
                yield tuple(msgspec.structs.replace(w, model="mn"[w.worker_id == "d2"]) for w in live)

    fleet = TwoModels(d1=hang, d2=hang)
    fleet.max_batch_size = 1
    async with generator_over(fleet) as generator:
        asked = [msgspec.structs.replace(request(600), model=model) for model in "mmnn"]
        async with running(*(anext(generator.generate(each)) for each in asked)):
            await asyncio.sleep(5)  # virtual time
            assert fleet.called == ["d1", "d2"]


def from_the_beginning(*steps: int, tokens: tuple[int, ...] = (10, 11, 12, 13)) -> Script:
    """An engine that refuses to go on, and makes `tokens` in steps of so many."""

    async def script(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        if sent.num_generated:
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
    async with generator_over(fleet) as generator:
        chunks = [chunk async for chunk in generator.generate(request())]
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == WHOLE
    assert all(chunk.token_ids for chunk in chunks)
    assert (chunks[-1].finish_reason, chunks[-1].usage) == ("stop", Usage(2, 0, 4))
    for chunk in chunks[num_before:]:
        assert tuple(each.token_id for each in chunk.logprobs or ()) == chunk.token_ids
    assert fleet.called == ["d1", "d2", "d2"]
    sent = fleet.calls[-1][1]
    assert (sent.token_ids, sent.num_generated) == ([1, 2], 0)


async def test_a_first_chunk_of_prefill_is_not_sent_twice() -> None:
    async def with_first(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        if sent.num_generated:
            raise NotResumable("not in the middle")
        async for handoff in hand_off_with_first(sent):
            yield handoff

    lost = script(TokenChunk((11,)), WorkerLost("gone"))
    rest = script(TokenChunk((11,)), TokenChunk((12,)), TokenChunk((13,), "length"))
    fleet = ScriptedWorkers(p1=with_first, d1=lost, d2=rest)
    assert await generate(fleet) == WHOLE
    assert fleet.called == ["p1", "d1", "p1", "p1", "d2"]


@pytest.mark.parametrize(
    "again", [from_the_beginning(4, tokens=(10, 99, 12, 13)), from_the_beginning(1, tokens=(10,))]
)
async def test_another_answer_than_before_ends_with_an_error_and_no_other_token(again: Script) -> None:
    fleet = ScriptedWorkers(d1=failing(WorkerLost("gone"), after=2), d2=again)
    got: list[int] = []
    async with generator_over(fleet) as generator:
        with pytest.raises(EngineFailure):  # noqa: PT012  after some tokens
            async for chunk in generator.generate(request()):
                got.extend(chunk.token_ids)
    assert got == [10, 11]


BROKEN_OFF = failing(WorkerLost("gone"), after=2)


@pytest.mark.parametrize(
    ("wait_for_worker_s", "deadline_s", "raised", "after_s"),
    [(5, 9, WorkerLost, 5), (5, 3, DeadlineExceeded, 3), (0, 9, WorkerLost, 0)],
)
@jumping
async def test_it_waits_no_longer_than_the_setting_or_its_deadline(
    wait_for_worker_s: float, deadline_s: float, raised: type[BatonError], after_s: float
) -> None:
    with pytest.raises(raised):
        await generate(ScriptedWorkers(d1=BROKEN_OFF), deadline_s, wait_for_worker_s=wait_for_worker_s)
    assert now_s() == pytest.approx(after_s, abs=0.1)


FULL = failing(Overloaded("full", retry_after_s=2))
AGAIN: dict[str, tuple[dict[str, Script], str]] = {
    "no decode worker can take the handoff":
        ({"p1": hand_off, "d1": failing(NotReady("draining")), "d2x": answer}, "p1 d1 p1 d2x"),
    "the only worker answers again": ({"d1": in_turn(BROKEN_OFF, answer)}, "d1 d1"),
    # The client of a request that prefill has taken may have a status already.
    "no room at decode": ({"p1": hand_off, "d1": in_turn(*[FULL] * 6, answer)}, "p1 d1 " * 7),
}  # fmt: skip


@pytest.mark.parametrize(("scripts", "called"), AGAIN.values(), ids=AGAIN)
def test_a_request_waits_and_is_tried_again(scripts: dict[str, Script], called: str) -> None:
    fleet = ScriptedWorkers(**scripts)
    fleet.answering.add("d1")
    assert run_jumping(generate(fleet, wait_for_worker_s=5, deadline_s=60)) == WHOLE
    assert fleet.called == called.split()


def test_workers_that_answer_probes_only_are_tried_four_times_with_growing_pauses() -> None:
    at_s: list[float] = []

    async def lost(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        at_s.append(now_s())
        async for chunk in failing(WorkerLost("gone"))(sent):
            yield chunk

    fleet = ScriptedWorkers(d1=lost)
    fleet.answering.add("d1")
    with pytest.raises(WorkerLost):
        run_jumping(generate(fleet, wait_for_worker_s=5))
    assert [after - before for before, after in pairwise(at_s)] == pytest.approx([0.2, 0.4, 0.8])


def test_failures_are_counted_anew_after_many_tokens() -> None:
    """Rolling restarts during a long answer are more than four losses."""
    some = failing(WorkerLost("gone"), after=32)
    fleet = ScriptedWorkers(d1=in_turn(*[some] * 9, script(TokenChunk((1,), "stop"))))
    fleet.answering.add("d1")
    assert len(run_jumping(generate(fleet, wait_for_worker_s=5, deadline_s=60))) == 9 * 32 + 1


@pytest.mark.parametrize(("retry_after_s", "pause_s"), [(2, 2), (None, 1)])
@jumping
async def test_a_running_answer_that_is_refused_waits_for_room(
    retry_after_s: float | None, pause_s: float
) -> None:
    full = failing(Overloaded("full", retry_after_s=retry_after_s))
    fleet = ScriptedWorkers(d1=in_turn(BROKEN_OFF, answer), d2=in_turn(*[full] * 6, answer))
    assert await generate(fleet, wait_for_worker_s=5, deadline_s=60) == WHOLE
    assert now_s() == pytest.approx(6 * pause_s, abs=1)
    assert fleet.called == ["d1"] + ["d2"] * 7
    assert fleet.calls[-1][1].deadline_s == pytest.approx(60 - 6 * pause_s, abs=1)


@pytest.mark.parametrize("error", [Overloaded("full"), NotReady("draining")])
@pytest.mark.parametrize("names", [("d1",), ("p1", "d1")])
@jumping
async def test_a_new_request_that_all_refuse_is_refused_at_once(
    error: BatonError, names: tuple[str, ...]
) -> None:
    fleet = ScriptedWorkers(**dict.fromkeys(names, failing(error)))
    with pytest.raises(type(error)):
        await generate(fleet, wait_for_worker_s=5)
    assert fleet.called == list(names)
    assert now_s() == pytest.approx(0, abs=0.1)


@jumping
async def test_a_request_is_taken_once_when_a_worker_is_there() -> None:
    fleet, taken_s = ScriptedWorkers(d1=in_turn(BROKEN_OFF, answer)), []
    fleet.broker_is_away = True
    fleet.answering.add("d1")
    loop = asyncio.get_running_loop()
    loop.call_later(2, setattr, fleet, "broker_is_away", False)
    async with generator_over(fleet, wait_for_worker_s=5) as generator:
        sent = request(deadline_s=9)
        async for _ in generator.generate(sent, "caller", lambda: taken_s.append(loop.time())):
            pass
    assert fleet.calls[0][1].deadline_s == pytest.approx(7, abs=0.3)
    assert taken_s == pytest.approx([2], abs=0.3)


@jumping
async def test_answers_on_workers_that_leave_take_no_places_of_the_others() -> None:
    endless = script(TokenChunk((1,)), None)
    fleet = ScriptedWorkers(d1=endless)
    fleet.max_batch_size = 2
    async with generator_over(fleet) as generator, running(*(token_ids_of(generator, 600) for _ in range(3))):
        await asyncio.sleep(1)  # virtual time
        assert len(fleet.called) == 2, "one waits"
        fleet.join("d2", endless)
        fleet.leave("d1")
        await asyncio.sleep(1)  # virtual time
        async with running(*(token_ids_of(generator, 600) for _ in range(2))):
            await asyncio.sleep(1)  # virtual time
            assert len(fleet.called) == 4, "the one that waited, and one more"
    assert fleet.called == ["d1", "d1", "d2", "d2"]
    assert fleet.calls[2][1].deadline_s <= 600 - 1, "the wait is part of its time"


def losing_broker(fleet: ScriptedWorkers, back_after_s: float) -> Script:
    """A worker whose broker goes away after two tokens."""

    async def script(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        async with aclosing(BROKEN_OFF(sent)) as chunks:
            yield await anext(chunks)
            yield await anext(chunks)
        fleet.broker_is_away = True
        asyncio.get_running_loop().call_later(back_after_s, setattr, fleet, "broker_is_away", False)
        raise BrokerLost("away")

    return script


def test_a_broker_that_was_away_costs_no_attempt_and_no_worker() -> None:
    fleet = ScriptedWorkers()
    fleet.scripts["d1"] = in_turn(losing_broker(fleet, 20), answer)
    assert run_jumping(generate(fleet, wait_for_worker_s=5, deadline_s=60)) == WHOLE
    assert fleet.called == ["d1", "d1"]


def test_a_handoff_that_the_broker_breaks_is_not_the_prefill_workers_fault() -> None:
    fleet = ScriptedWorkers()
    loses = losing_broker(fleet, 1)

    async def handing(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        yield HANDOFF
        async for _ in loses(sent):
            pass

    waiting = hang  # for KV that does not come
    fleet.scripts |= {"p1": in_turn(handing, hand_off), "d1": in_turn(waiting, answer)}
    assert run_jumping(generate(fleet, wait_for_worker_s=5)) == WHOLE
    assert fleet.called == ["p1", "d1"] * 2


@pytest.mark.parametrize(("deadline_s", "raised"), [(60, BrokerLost), (3, DeadlineExceeded)])
@jumping
async def test_a_new_request_waits_for_the_broker_as_long_as_for_a_worker(
    deadline_s: float, raised: type[BatonError]
) -> None:
    fleet = ScriptedWorkers(d1=answer)
    fleet.broker_is_away = True
    with pytest.raises(raised) as failure:
        await generate(fleet, wait_for_worker_s=5, deadline_s=deadline_s)
    assert raised is DeadlineExceeded or failure.value.retry_after_s == 1
    assert now_s() == pytest.approx(min(5, deadline_s), abs=0.1)
    assert not fleet.called
