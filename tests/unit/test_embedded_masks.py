"""When an answer's next mask is requested, and how long steps wait for it."""

import asyncio
import contextlib
import socket
from array import array
from collections.abc import Iterator

import msgspec
import pytest

from baton.messages import Sampling
from tests.waiting import PATIENCE_S, until
from workers.engines.embedded.grammar_server import Next, Read
from workers.engines.embedded.masks import Masks
from workers.engines.embedded.matcher import Matcher
from workers.engines.embedded.scheduler import Phase, Sequence


@contextlib.contextmanager
def guided(*, pulls_kv: bool = False) -> Iterator[tuple[Sequence, socket.socket]]:
    """A guided sequence, and its process's end of the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    matcher = Matcher(ours, vocab_size=8, param=None)
    with theirs:
        theirs.setblocking(False)
        yield Sequence([5, 6], 2, Sampling(max_tokens=5, seed=0), 7, pulls_kv, matcher=matcher), theirs
        matcher.close()


async def test_an_answer_that_pulls_its_kv_asks_once_its_first_token_is_known() -> None:
    masks = Masks(lambda _: None)
    with guided(pulls_kv=True) as (sequence, process):
        masks.ask(sequence)
        sequence.token_ids.append(7)  # it came with the KV
        sequence.phase = Phase.RUNNING
        masks.ask(sequence)
        asked = msgspec.msgpack.decode(process.recv(1000), type=Read)
        assert asked == Read(array("I", [7]).tobytes(), asks=True)
        with pytest.raises(BlockingIOError):
            process.recv(1000)
        masks.forget(sequence)


@pytest.mark.parametrize("phase", [Phase.PINNED, Phase.DONE])
async def test_a_sequence_that_samples_no_more_needs_no_mask(phase: Phase) -> None:
    with guided() as (sequence, process):
        sequence.phase = phase
        Masks(lambda _: None).ask(sequence)
        with pytest.raises(BlockingIOError):
            process.recv(1000)


async def test_a_forgotten_answer_is_not_listened_to_any_more() -> None:
    masks = Masks(lambda _: None)
    with guided() as (sequence, _):
        assert sequence.matcher is not None
        fileno = sequence.matcher.fileno()
        masks.ask(sequence)
        masks.forget(sequence)
        assert not asyncio.get_running_loop().remove_reader(fileno)


async def test_a_step_waits_for_running_answers_until_the_last_has_its_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.engines.embedded.masks._PATIENCE_S", PATIENCE_S)
    changed: list[Sequence] = []
    masks = Masks(changed.append)
    with guided() as (first, one), guided() as (second, other), guided() as (waiting, _):
        masks.ask(waiting)
        begun = asyncio.create_task(masks.moment())
        await asyncio.sleep(0)
        assert begun.done()  # it does not run yet
        for sequence in (first, second):
            sequence.phase = Phase.RUNNING
            masks.ask(sequence)
        one.send(msgspec.msgpack.encode(Next(b"\xff")))
        step = asyncio.create_task(masks.moment())
        await until(lambda: changed == [first])
        assert not step.done()
        other.send(msgspec.msgpack.encode(Next(b"\xff")))
        await step
        assert changed == [first, second]
        masks.ask(first)
        next_step = asyncio.create_task(masks.moment())
        await asyncio.sleep(0)
        assert not next_step.done()
        one.send(msgspec.msgpack.encode(Next(b"")))
        await next_step
        masks.ask(first)  # its form is complete
        await masks.moment()
        for sequence in (first, second, waiting):
            masks.forget(sequence)


async def test_a_late_mask_delays_one_step_only() -> None:
    changed: list[Sequence] = []
    masks = Masks(changed.append)
    with guided() as (sequence, process):
        sequence.phase = Phase.RUNNING
        masks.ask(sequence)
        await masks.moment()
        next_step = asyncio.create_task(masks.moment())
        await asyncio.sleep(0)
        assert next_step.done()
        process.send(msgspec.msgpack.encode(Next(b"\xff")))
        await until(lambda: changed == [sequence])
        masks.forget(sequence)
