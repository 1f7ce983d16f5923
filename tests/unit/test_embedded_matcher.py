"""The engine's end of a form's process: what it sends, and what it makes of the replies."""

import contextlib
import gc
import socket
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from workers.engines.embedded.grammar_server import MAX_MESSAGE_BYTES, Next, Read
from workers.engines.embedded.matcher import Matcher


@contextlib.contextmanager
def matching(vocab_size: int = 5) -> Iterator[tuple[Matcher, socket.socket]]:
    """A matcher, and its process's end of the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    matcher = Matcher(ours, vocab_size, param="text.format")
    with theirs:
        theirs.setblocking(False)
        yield matcher, theirs
        matcher.close()


def reads(process: socket.socket) -> list[tuple[int, bool]]:
    """(tokens, asks) of each message so far."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            read = msgspec.msgpack.decode(process.recv(MAX_MESSAGE_BYTES), type=Read)
            found.append((len(read.token_ids) // 4, read.asks))
    return found


def reply(process: socket.socket, mask: bytes, problem: str = "") -> None:
    process.send(msgspec.msgpack.encode(Next(mask, problem)))


@pytest.mark.parametrize(
    ("num_tokens", "sent"),
    [
        (0, [(0, True)]),
        (1, [(1, True)]),
        (16_384, [(16_384, True)]),
        (16_385, [(16_384, False), (1, True)]),
    ],
)
def test_only_the_last_message_asks(num_tokens: int, sent: list[tuple[int, bool]]) -> None:
    with matching() as (matcher, process):
        matcher.ask([3, 3] + num_tokens * [1], 2)
        assert reads(process) == sent


def test_a_mask_is_asked_for_once_for_each_token() -> None:
    with matching() as (matcher, process):
        reply(process, b"\x15")
        for _ in range(2):
            allowed = matcher.allowed([3, 3, 1], 2)
            assert allowed is not None
            assert allowed.tolist() == [True, False, True, False, True]
            assert allowed.dtype == np.bool_
        assert reads(process) == [(1, True)]
        reply(process, b"\x01")
        allowed = matcher.allowed([3, 3, 1, 2], 2)
        assert allowed is not None
        assert allowed.tolist() == [True, False, False, False, False]
        assert reads(process) == [(1, True)]


def test_after_its_end_a_form_allows_everything_and_is_told_no_more() -> None:
    with matching() as (matcher, process):
        reply(process, b"")
        assert matcher.allowed([3], 1) is None
        assert matcher.error is None
        assert matcher.allowed([3, 1], 1) is None
        assert reads(process) == [(0, True)]


def test_a_process_that_has_ended_is_an_error_and_is_not_waited_for_again() -> None:
    with matching() as (matcher, process):
        process.close()
        assert matcher.allowed([3], 1) is None
        assert matcher.allowed([3, 1], 1) is None
        assert matcher.error is not None
        assert "too much CPU time or memory" in matcher.error.message
        assert matcher.error.param == "text.format"


def test_a_process_that_ends_without_reading_is_an_error() -> None:
    with matching() as (matcher, process):
        matcher.ask([3], 1)
        process.close()
        matcher.receive()
        assert matcher.is_ready
        assert matcher.error is not None


def test_a_matcher_that_is_dropped_ends_its_process() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    matcher = Matcher(ours, 5, param=None)
    del ours, matcher
    gc.collect()
    with theirs:
        theirs.setblocking(False)
        assert theirs.recv(1) == b""


def test_a_problem_is_the_clients() -> None:
    with matching() as (matcher, process):
        reply(process, b"", "the stack overflowed")
        assert matcher.allowed([3], 1) is None
        assert matcher.error is not None
        assert "any further: the stack overflowed." in matcher.error.message
