"""Processes of one frontend over real Unix sockets, some of which hang, refuse or die."""

import asyncio
import gc
import socket
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from baton.errors import InvalidRequest, NotReady
from frontend.harmony.conversation import AssistantTurn, WrittenMessage
from frontend.http.limits import KeyLimits, Quotas, RateLimited
from frontend.metrics import Metrics
from frontend.processes import sibling_messages as wire
from frontend.processes import siblings
from frontend.processes.siblings import Shared, Siblings
from frontend.responses.runs import Runs
from frontend.turn.thoughts import Kept, Thoughts
from frontend.turn.written import WrittenTurn
from tests.clock import run_jumping
from tests.generators import none_abandoned
from tests.waiting import PATIENCE_S, until

MESSAGE = WrittenMessage(kind="text", text="Hello", token_ids=array("I", [200_005, 17]), is_first=True)
TURN = WrittenTurn(messages=(MESSAGE,))
ENTRY = Kept("key", ("call_1",), TURN)
EVENTS = b'event: a\ndata: {"sequence_number":4}\n\nevent: b\ndata: {"sequence_number":5}\n\n'
Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def process(folder: Path, index: int) -> AsyncIterator[tuple[Siblings, Thoughts, Metrics]]:
    """Process `index` of two."""
    own = Siblings(folder, index, 2)
    thoughts, metrics = Thoughts(share=own.share), Metrics()
    async with own.answering(Shared(thoughts, metrics, Runs(), Quotas())):
        yield own, thoughts, metrics


@asynccontextmanager
async def faulty(folder: Path, reply: Reply) -> AsyncIterator[Siblings]:
    """Process 0, whose only sibling replies like this."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        await reply(writer)
        while await reader.read(1 << 16):  # until this process hangs up
            pass
        writer.close()

    server = await asyncio.start_unix_server(answer, folder / "1.sock")
    yield Siblings(folder, 0, 2)
    server.close()


async def written(own: Siblings) -> list[asyncio.StreamWriter]:
    """Its connections for entries, once there are any."""
    await until(lambda: own._writers)  # noqa: SLF001  nothing else shows it
    return list(own._writers.values())  # noqa: SLF001


async def send(writer: asyncio.StreamWriter, *parts: wire.Answer) -> None:
    """Send these parts and close, with or without an end; nothing: hang."""
    for part in parts:
        writer.write(wire.frame(part))
    if parts:
        writer.close()


def test_entries_arrive_in_order_and_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with process(tmp_path, 0) as (_, own, _), process(tmp_path, 1) as (_, other, _):
            for number in range(3):
                own.keep("key", ["call_1", f"call_{number}"], f"thought {number}")
            own.keep_turn("key", [], TURN)
            await until(lambda: other.num_bytes == own.num_bytes)
            assert other.recall("key", "call_1") == "thought 2"
            (told,) = other.completed("key", [AssistantTurn(text="Hello")])
            assert isinstance(told, AssistantTurn)
            assert told.written == (MESSAGE,)

    run_jumping(scenario())


def test_what_a_key_uses_counts_in_every_process(tmp_path: Path) -> None:
    limits = KeyLimits(requests_per_minute=3)

    @asynccontextmanager
    async def counting(index: int) -> AsyncIterator[Quotas]:
        own = Siblings(tmp_path, index, 3)
        quotas = Quotas(own.share_use)
        async with own.answering(Shared(Thoughts(), Metrics(), Runs(), quotas)):
            yield quotas

    def is_used_up(quotas: Quotas) -> bool:
        quota = quotas.of("alice", limits)
        assert quota is not None
        return (b"x-ratelimit-remaining-requests", b"0") in quota.headers()

    async def scenario() -> None:
        async with counting(0) as first, counting(1) as second, counting(2) as third:
            for quotas in (first, first, second):
                quota = quotas.of("alice", limits)
                assert quota is not None
                quota.admit()
            for quotas in (first, second, third):
                await until(lambda quotas=quotas: is_used_up(quotas))  # type: ignore[misc]  # bound now
            other = third.of("bob", limits)
            assert other is not None
            other.admit()
            last = third.of("alice", limits)
            assert last is not None
            with pytest.raises(RateLimited):
                last.admit()

    run_jumping(scenario())


def test_metrics_are_added(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with process(tmp_path, 0) as (first, _, mine), process(tmp_path, 1) as (_, _, other):
            for metrics, num_tokens in ((mine, 5), (other, 7)):
                tally = metrics.begin("/v1/x")
                tally.model, tally.num_prompt_tokens = "m", num_tokens
                metrics.end(tally)
            other.begin("/v1/x")
            page = mine.page([], await first.metrics()).decode()
            assert 'baton_prompt_tokens_total{model="m"} 12.0' in page
            assert 'baton_running_requests{route="/v1/x"} 1.0' in page
            assert 'baton_requests_total{model="m",route="/v1/x",status="200"} 2.0' in page
            assert 'baton_request_duration_seconds_bucket{le="600.0",model="m",route="/v1/x"} 2.0' in page
            (line,) = [line for line in page.splitlines() if "prompt_tokens_created{" in line]
            assert float(line.split()[1]) == created(mine)

    run_jumping(scenario())


def created(metrics: Metrics) -> float | None:
    """When its counter of prompt tokens began; the first process's is the earlier."""
    return metrics.registry.get_sample_value("baton_prompt_tokens_created", {"model": "m"})


def test_a_process_that_hangs_or_is_missing_is_left_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        absent = Siblings(tmp_path, 0, 2)
        absent.share(ENTRY)
        assert await absent.metrics() == []
        assert not await absent.stop("resp_1")
        async with absent.follow("resp_1", 0) as followed:
            assert followed is None
        loop = asyncio.get_running_loop()
        async with faulty(tmp_path, send) as hanging:  # nothing
            with none_abandoned():
                assert await hanging.metrics() == []
            began_s = loop.time()
            assert await hanging.metrics() == []
            assert loop.time() - began_s == pytest.approx(1.0, abs=0.1)
            assert not await hanging.stop("resp_1")
            assert loop.time() - began_s == pytest.approx(11.0, abs=0.2)
            async with hanging.follow("resp_1", 0) as followed:
                assert followed is None
            assert loop.time() - began_s == pytest.approx(21.0, abs=0.3)

    run_jumping(scenario())


def test_a_run_of_another_process_is_followed_to_its_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = (wire.Found(), wire.Events(EVENTS), wire.Done())
        async with (
            faulty(tmp_path, lambda writer: send(writer, *parts)) as process,
            process.follow("resp_1", 3) as followed,
        ):
            assert followed is not None
            assert followed.num_events == 4
            assert await followed.outbox.take() == EVENTS
            assert await followed.outbox.take() == b""
            assert followed.num_events == 6

    run_jumping(scenario())


def test_a_process_that_dies_ends_what_is_followed_with_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = (wire.Found(), wire.Events(EVENTS))
        async with (
            faulty(tmp_path, lambda writer: send(writer, *parts)) as process,
            process.follow("resp_1", 3) as followed,
        ):
            assert followed is not None
            assert await followed.outbox.take() == EVENTS
            with pytest.raises(NotReady, match="has ended"):
                await followed.outbox.take()

    run_jumping(scenario())


def test_events_that_are_not_stored_are_refused_as_by_the_process_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        refused = wire.Refused(InvalidRequest("Not stored.", param="stream").to_wire())
        async with faulty(tmp_path, lambda writer: send(writer, refused, wire.Done())) as process:
            with pytest.raises(InvalidRequest, match="Not stored") as error:
                async with process.follow("resp_1", 3):
                    pass
            assert error.value.param == "stream"

    run_jumping(scenario())


def test_a_process_that_ends_in_mid_answer_counts_no_more(tmp_path: Path) -> None:
    async def hang_up(writer: asyncio.StreamWriter) -> None:
        writer.write(wire.frame(wire.Values([]))[:5])
        writer.close()

    async def scenario() -> None:
        async with faulty(tmp_path, hang_up) as process:
            assert await process.metrics() == []
            with pytest.raises(NotReady, match="has ended"):
                await process.stop("resp_1")

    run_jumping(scenario())


def test_an_answer_that_is_longer_than_any_is_not_waited_for(tmp_path: Path) -> None:
    async def exaggerate(writer: asyncio.StreamWriter) -> None:
        writer.write((wire.MAX_FRAME_BYTES + 1).to_bytes(4))

    async def scenario() -> None:
        async with faulty(tmp_path, exaggerate) as process:
            with pytest.raises(NotReady, match="has ended"):
                async with process.follow("resp_1", 3):
                    pass

    assert wire.MAX_FRAME_BYTES == 64 << 20
    run_jumping(scenario())


def test_one_who_stops_following_hangs_up(tmp_path: Path) -> None:
    hung_up = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(wire.frame(wire.Found()) + wire.frame(wire.Events(EVENTS)))
        await reader.read()
        hung_up.set()
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_unix_server(answer, tmp_path / "1.sock"):
            with none_abandoned():
                async with Siblings(tmp_path, 0, 2).follow("resp_1", 3) as followed:
                    assert followed is not None
                    assert await followed.outbox.take() == EVENTS
                    assert not hung_up.is_set()
            await hung_up.wait()

    run_jumping(scenario())


def test_entries_reach_a_process_that_starts_later_and_the_one_that_replaces_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with process(tmp_path, 0) as (first, own, _):
            own.keep("key", ["early"], "thought")
            assert await first.metrics() == []  # there is no other yet
            for number in range(2):
                async with process(tmp_path, 1) as (_, other, _):

                    def is_heard(number: int = number, other: Thoughts = other) -> str | None:
                        own.keep("key", [f"call_{number}"], "thought")
                        return other.recall("key", f"call_{number}")

                    await until(is_heard)
                assert await first.metrics() == []  # it answers no more
            own.keep("key", ["late"], "thought")
            own.keep("key", ["later"], "thought")  # a connection that is broken does not keep it from ending
        gc.collect()
        assert not [record for record in caplog.records if record.name == "asyncio"]

    run_jumping(scenario())


def test_a_process_that_reads_nothing_misses_entries_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert siblings.MAX_UNSENT_BYTES == 16 << 20
    monkeypatch.setattr(siblings, "MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(siblings, "HANG_UP_TIMEOUT_S", PATIENCE_S)
    entry = Kept("key", ("call_1",), "x" * 100_000)
    reads, ended = asyncio.Event(), asyncio.Event()
    num_bytes = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_bytes
        await reads.wait()
        while data := await reader.read(1 << 16):
            num_bytes += len(data)
        writer.close()
        ended.set()

    async def scenario() -> None:
        async with await asyncio.start_unix_server(answer, tmp_path / "1.sock"):
            async with process(tmp_path, 0) as (own, _, _):
                own.share(entry)
                await written(own)
                for _ in range(100):
                    own.share(entry)
                reads.set()
            await ended.wait()  # it has hung up at its end
        assert 1 << 20 < num_bytes < 3 << 20

    run_jumping(scenario())


def test_a_process_that_reads_nothing_keeps_none_from_ending(tmp_path: Path) -> None:
    entry = Kept("key", ("call_1",), "x" * 1_000_000)
    ended = asyncio.Event()

    async def freeze(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_unix_server(freeze, tmp_path / "1.sock"):
            async with process(tmp_path, 0) as (own, _, _):
                for _ in range(4):
                    own.share(entry)
                (told,) = await written(own)
                assert told.transport.get_write_buffer_size() > 0
            assert told.transport.get_write_buffer_size() == 0
            ended.set()

    run_jumping(scenario())


def test_a_process_that_reads_no_answer_keeps_none_from_ending(tmp_path: Path) -> None:
    """A question may come from one that is frozen before it has read the answer."""

    def is_full(frozen: socket.socket) -> bool:
        with suppress(BlockingIOError):
            frozen.send(wire.frame(wire.Scrape()) * 1000)
            return False
        return True

    async def scenario() -> None:
        with socket.socket(socket.AF_UNIX) as frozen:
            async with process(tmp_path, 0):
                frozen.connect(str(tmp_path / "0.sock"))
                frozen.setblocking(False)
                await until(lambda: is_full(frozen))

    run_jumping(scenario())
