"""What the processes of one frontend share, over real Unix sockets; some of them hang, die or start late."""

import socket
from array import array
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from frontend.harmony.conversation import WrittenMessage
from frontend.metrics import Metrics, Scrape
from frontend.processes import siblings
from frontend.processes.siblings import SCRAPE_TIMEOUT_S, SILENCE_S, Siblings
from frontend.responses.runs import ResponseState
from frontend.snapshot import Look, Part, Second, Slow
from frontend.turn.thoughts import Kept, Thoughts
from tests.clock import jumping, now_s, run_jumping
from tests.waiting import until


def entry(call_id: str, text: str = "thought") -> Kept:
    thought = WrittenMessage(kind="thought", text=text, token_ids=array("I", [200_005, 17]))
    return Kept("key", call_id, (thought,), "2026-11-28")


SLOW = Slow(request_id="r", status=200, duration_s=2.0, stages={"queue": 1.0}, verdict="")
PART = Part(
    num_running=1,
    stages={"queue": 1},
    handoffs={("p", "d"): 2},
    seconds=[Second(10**9, Counter({40: 1}), Counter({9: 2}), Counter(ended=1))],
    slowest=[SLOW],
)


@asynccontextmanager
async def process(folder: Path, index: int) -> AsyncIterator[tuple[Siblings, Thoughts, Metrics]]:
    """Process `index` of two."""
    own = Siblings(folder, index, 2)
    thoughts, metrics = Thoughts(share=own.share), Metrics()
    async with own.answering(thoughts, metrics, ResponseState(), {7: PART}.__getitem__):
        yield own, thoughts, metrics


@jumping
async def test_entries_arrive_in_order_and_whole(tmp_path: Path) -> None:
    async with process(tmp_path, 0) as (_, own, _), process(tmp_path, 1) as (_, other, _):
        for number in range(3):
            own.keep(entry("call_1", f"thought {number}"))
        await until(lambda: other.recall("key", "call_1") == own.recall("key", "call_1"))
        assert other.recall("key", "call_1") == entry("call_1", "thought 2")


@jumping
async def test_parts_of_the_snapshot_arrive_whole(tmp_path: Path) -> None:
    async with process(tmp_path, 0) as (first, *_), process(tmp_path, 1):
        assert await first.ask(Look(7)) == [PART]


@jumping
async def test_a_process_that_is_missing_or_hangs_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "MAX_SENDING", 10)
    assert (SCRAPE_TIMEOUT_S, SILENCE_S) == (1.0, 10.0)
    async with process(tmp_path, 0) as (first, own, _):
        first.share(entry("call_1"))
        assert await first.ask(Scrape()) == []
        with socket.socket(socket.AF_UNIX) as frozen:
            frozen.bind(f"\0{tmp_path}/1")
            frozen.listen()
            began_s = now_s()
            assert await first.ask(Scrape()) == []
            assert now_s() - began_s == pytest.approx(SCRAPE_TIMEOUT_S, abs=0.2)
            for number in range(1000):
                own.keep(entry(f"call_{number}", "x" * 1000))
            assert len(first._sending) <= 10  # noqa: SLF001  nothing else shows what waits
            await until(lambda: not first._sending)  # noqa: SLF001
            assert now_s() - began_s < 2 * SILENCE_S


def test_entries_reach_a_process_that_starts_later_and_the_one_that_replaces_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with process(tmp_path, 0) as (first, own, _):
            own.keep(entry("early"))
            for number in range(2):
                async with process(tmp_path, 1) as (_, other, _):

                    def is_heard(number: int = number, other: Thoughts = other) -> Kept | None:
                        own.keep(entry(f"call_{number}"))
                        return other.recall("key", f"call_{number}")

                    await until(is_heard)
                assert await first.ask(Scrape()) == []  # it answers no more
        assert not [record for record in caplog.records if record.name == "asyncio"]

    run_jumping(scenario())
