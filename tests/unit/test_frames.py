"""Frames as bytes: any split of the stream, every limit, lost frames detected."""

import asyncio

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton import frames
from baton.errors import BatonError
from baton.frames import (
    Beat,
    End,
    FrameReader,
    FrameWriter,
    Goodbye,
    Hello,
    LinkBroken,
    Next,
    Signal,
    Splitter,
)
from baton.messages import TokenChunk
from tests.links import Sent, frame


@given(st.lists(st.binary(max_size=300), max_size=20), st.data())
def test_frames_survive_any_cut_of_the_byte_stream(sent: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frames.with_length(frame) for frame in sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=30).map(sorted))
    splitter, received = Splitter(), list[bytearray]()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += splitter.feed(stream[start:end])
    assert received == sent


def test_a_length_over_the_limit_is_refused_before_its_bytes_come_and_the_first_frames_may_be_lower() -> None:
    with pytest.raises(LinkBroken, match="exceeds the limit"):
        Splitter().feed((frames.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    both = bytes(10), bytes(99)
    assert Splitter(10).feed(b"".join(map(frames.with_length, both))) == [*both]
    with pytest.raises(LinkBroken, match="exceeds the limit of 10"):
        Splitter(10).feed(frames.with_length(bytes(11)))


@example(b"\x92\x00\x91\x93\x00\x02\xa1\xff")  # not UTF-8
@given(st.binary(max_size=200))
def test_bytes_that_are_no_frame_break_the_link_and_nothing_else(noise: bytes) -> None:
    with pytest.raises(LinkBroken):
        FrameReader(frames.FROM_CALLER, "w").open(noise)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (frame(0, Hello(frames.VERSION + 1, "w")), f"uses protocol version {frames.VERSION + 1}"),
        (frame(0, Hello(frames.VERSION - 1, "w")), f"uses protocol version {frames.VERSION - 1}"),
        (frame(0, Hello(frames.VERSION, "v")), "calls a worker of another name"),
        (frame(0, End(1)), "did not send a Hello"),
        (frame(0), "did not send a Hello"),
        (frame(1, Hello(frames.VERSION, "w")), "frame 0 was lost"),
        (msgspec.msgpack.encode((0, [[99, 1]])), "cannot decode its frame"),
    ],
)
def test_a_link_starts_with_the_right_hello_or_not_at_all(first: bytes, reason: str) -> None:
    with pytest.raises(LinkBroken, match=reason):
        FrameReader(frames.FROM_WORKER, "w").open(first)


def test_a_frame_that_is_lost_breaks_the_link_and_one_that_comes_twice_is_ignored() -> None:
    reader = FrameReader(frames.FROM_WORKER, "w")
    reader.open(frame(0, Hello(frames.VERSION, "w")))
    assert reader.open(frame(1, Beat())) == [Beat()]
    for number in (0, 1):
        assert reader.open(frame(number, Goodbye("twice"))) == []
    with pytest.raises(LinkBroken, match="frame 2 was lost"):
        reader.open(frame(3, Beat()))


def test_a_token_below_zero_breaks_the_link() -> None:
    reader = FrameReader(frames.FROM_WORKER, "w")
    reader.open(frame(0, Hello(frames.VERSION, "w")))
    with pytest.raises(LinkBroken, match="cannot decode its frame"):
        reader.open(frame(1, Next(1, TokenChunk(token_ids=(-1,)))))


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(60, 300))
async def test_any_signals_leave_in_order_in_frames_below_the_limit(sizes: list[int], limit: int) -> None:
    replies: list[Signal] = [Next(i, TokenChunk(token_ids=(9,) * size)) for i, size in enumerate(sizes)]
    wire, refused = Sent(limit), list[Signal]()

    def refuse(signal: Signal, _: BatonError) -> Signal:
        refused.append(signal)
        return Beat()

    writer = FrameWriter(wire, refuse)
    for reply in replies:
        writer.put(reply)
    await asyncio.sleep(0)  # frames are sealed once a turn
    opened = [frames.FROM_WORKER.decode(each) for each in wire.frames]
    assert [number for number, _ in opened] == list(range(len(opened)))
    assert all(len(each) <= limit for each in wire.frames)
    assert [signal for _, signals in opened for signal in signals] == [
        Beat() if reply in refused else reply for reply in replies
    ]
    assert all(len(frame(0, signal)) > limit for signal in refused)


async def test_the_hello_leaves_alone_as_unknown_callers_may_not_send_more() -> None:
    wire = Sent()
    writer = FrameWriter(wire, lambda signal, _: pytest.fail(str(signal)))
    for signal in (Hello(frames.VERSION, "w"), Beat(), Beat()):
        writer.put(signal)
    await asyncio.sleep(0)  # frames are sealed once a turn
    assert wire.frames == [frame(0, Hello(frames.VERSION, "w")), frame(1, Beat(), Beat())]


async def test_a_frame_of_the_limit_is_sent_and_nothing_after_the_goodbye() -> None:
    wire = Sent(len(frame(0, End(1))))
    writer = FrameWriter(wire, lambda signal, _: pytest.fail(str(signal)))
    writer.put(End(1))
    await asyncio.sleep(0)  # frames are sealed once a turn
    wire.max_frame_bytes = frames.MAX_FRAME_BYTES
    writer.put(End(2))
    writer.close(Goodbye("enough"))
    writer.put(End(3))
    await asyncio.sleep(0)  # what waits is written
    assert wire.frames == [frame(0, End(1)), frame(1, End(2), Goodbye("enough"))]
