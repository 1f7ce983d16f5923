"""A request waits for a worker or the broker, as long as it may, and never spins."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise

import pytest

from baton.errors import (
    BatonError,
    BrokerLost,
    DeadlineExceeded,
    NotReady,
    Overloaded,
    WorkerLost,
)
from baton.messages import GenerateRequest, Reply, TokenChunk
from frontend.routing.generate import Generator
from tests.clock import jumping, run_jumping
from tests.scripted_workers import (
    HANDOFF,
    Script,
    ScriptedWorkers,
    answer,
    failing,
    generate,
    generator_over,
    hand_off,
    hang,
    in_turn,
    request,
    script,
)

WHOLE = [10, 11, 12, 13]
LOST = failing(WorkerLost("gone"), after=2)


@jumping
async def test_a_running_answer_waits_for_a_decode_worker_to_join() -> None:
    fleet = ScriptedWorkers(p1=hand_off, d1=LOST)
    asyncio.get_running_loop().call_later(4, fleet.join, "d2", answer)
    assert (await generate(fleet, wait_for_worker_s=5, deadline_s=9)) == WHOLE
    assert fleet.called == ["p1", "d1", "p1", "d2"]


@pytest.mark.parametrize(
    ("wait_for_worker_s", "deadline_s", "raised", "after_s"),
    [(5, 9, WorkerLost, 5), (5, 3, DeadlineExceeded, 3), (0, 9, WorkerLost, 0)],
)
@jumping
async def test_it_waits_no_longer_than_the_setting_or_its_deadline(
    wait_for_worker_s: float, deadline_s: float, raised: type[BatonError], after_s: float
) -> None:
    with pytest.raises(raised):
        await generate(ScriptedWorkers(d1=LOST), 0, wait_for_worker_s, deadline_s)
    assert asyncio.get_running_loop().time() == pytest.approx(after_s, abs=0.1)


def test_a_handoff_that_no_decode_worker_can_take_is_not_requested_again() -> None:
    fleet = ScriptedWorkers(p1=hand_off, d1=failing(NotReady("draining")), d2x=answer)

    assert run_jumping(generate(fleet, wait_for_worker_s=5)) == WHOLE
    assert fleet.called == ["p1", "d1", "p1", "d2x"]


def test_the_only_worker_is_called_again_when_it_answers_again() -> None:
    fleet = ScriptedWorkers(d1=in_turn(LOST, answer))
    fleet.answering.add("d1")

    assert run_jumping(generate(fleet, wait_for_worker_s=5)) == WHOLE
    assert fleet.called == ["d1", "d1"]


def test_workers_that_answer_probes_only_are_tried_four_times_with_growing_pauses() -> None:
    at_s: list[float] = []

    async def lost(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        at_s.append(asyncio.get_running_loop().time())
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
    fleet = ScriptedWorkers(d1=in_turn(LOST, answer), d2=in_turn(*[full] * 6, answer))
    assert await generate(fleet, wait_for_worker_s=5, deadline_s=60) == WHOLE
    assert asyncio.get_running_loop().time() == pytest.approx(6 * pause_s, abs=1)
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
    assert asyncio.get_running_loop().time() == pytest.approx(0, abs=0.1)


def test_a_request_that_prefill_has_taken_waits_for_room_at_decode() -> None:
    """Its client may have got a status already."""
    full = failing(Overloaded("full", retry_after_s=2))
    fleet = ScriptedWorkers(p1=hand_off, d1=in_turn(*[full] * 6, answer))

    assert run_jumping(generate(fleet, wait_for_worker_s=5, deadline_s=60)) == WHOLE
    assert fleet.called == ["p1", "d1"] * 7


@jumping
async def test_a_request_is_taken_once_when_a_worker_is_there() -> None:
    fleet, taken_s = ScriptedWorkers(d1=in_turn(LOST, answer)), []
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

    async def run(generator: Generator, taken: list[None]) -> None:
        async for _ in generator.generate(request(deadline_s=600), "a", lambda: taken.append(None)):
            pass

    async with generator_over(fleet) as generator:
        taken: list[None] = []
        tasks = [asyncio.create_task(run(generator, taken)) for _ in range(3)]
        await asyncio.sleep(1)
        assert len(taken) == 2, "one waits"
        fleet.join("d2", endless)
        fleet.leave("d1")
        await asyncio.sleep(1)
        tasks += [asyncio.create_task(run(generator, taken)) for _ in range(2)]
        await asyncio.sleep(1)
        assert len(taken) == 4, "the one that waited, and one more"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert fleet.called == ["d1", "d1", "d2", "d2"]
    assert fleet.calls[2][1].deadline_s <= 600 - 1, "the wait is part of its time"


def losing_broker(fleet: ScriptedWorkers, back_after_s: float) -> Script:
    """A worker whose broker goes away after two tokens."""

    async def script(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        async with aclosing(LOST(sent)) as chunks:
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
    assert asyncio.get_running_loop().time() == pytest.approx(min(5, deadline_s), abs=0.1)
    assert not fleet.called


@pytest.mark.parametrize(
    ("stuck", "local_prefill_tokens", "called"),
    [("p1", 0, ["p1"]), ("d1", 0, ["p1", "d1"]), ("d1", 50, ["d1"])],
)
@jumping
async def test_a_worker_that_makes_no_progress_with_it_is_given_up(
    stuck: str, local_prefill_tokens: int, called: list[str]
) -> None:
    async def overdue(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        await asyncio.sleep(sent.deadline_s)
        async for chunk in failing(DeadlineExceeded())(sent):
            yield chunk

    fleet = ScriptedWorkers(**{"p1": hand_off, "d1": answer, stuck: overdue})
    fleet.answering = {"p1", "d1"}
    async with generator_over(fleet, local_prefill_tokens=local_prefill_tokens) as generator:
        chunks = generator.generate(request(deadline_s=60))
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0.1)
        assert fleet.called == called
        await asyncio.sleep(29.9)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert fleet.lost == [stuck]
