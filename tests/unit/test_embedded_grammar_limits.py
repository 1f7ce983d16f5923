"""The limits of a form's processes: what they may use, and that a server without room says so."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec
import pytest

from tests.guided import answer_form
from workers.engines.embedded.grammar_server import (
    BUSY,
    MAX_MESSAGE_BYTES,
    Read,
    _fork_for_each,
    _hold_answer,
)


def test_a_server_that_cannot_fork_says_so_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise BlockingIOError("too many processes")

    def never(_: socket.socket) -> None:
        raise AssertionError("nothing was forked")

    monkeypatch.setattr(os, "fork", fails)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, contextlib.ExitStack() as stack:
        asking = []
        for _ in range(2):
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            asking.append([stack.enter_context(end) for end in ends])
            socket.send_fds(ours, [b"."], [ends[1].fileno()])
            ends[1].close()
        ours.shutdown(socket.SHUT_WR)
        _fork_for_each(theirs, never)
        for end, _ in asking:
            assert end.recv(MAX_MESSAGE_BYTES) == BUSY
            assert end.recv(MAX_MESSAGE_BYTES) == b""


LIMITS = """
import os, resource, signal, socket, sys, threading
from workers.engines.embedded import grammar_server as server

def used() -> int:
    with open("/proc/self/statm", encoding="ascii") as sizes:
        return int(sizes.read().split()[5]) * resource.getpagesize()

def compile_form(*_):
    room = resource.getrlimit(resource.RLIMIT_DATA)[0] - used()
    here, main = (os.getpriority(os.PRIO_PROCESS, i) for i in (threading.get_native_id(), os.getpid()))
    nicer = here - main
    print(signal.getitimer(signal.ITIMER_PROF)[0], room >> 20, nicer, threading.stack_size() >> 20)

def fork_for_each(*_):
    print(signal.getitimer(signal.ITIMER_PROF)[0])

server.compile_form, server._fork_for_each = compile_form, fork_for_each
server._hold_form(socket.socket(fileno=0), None)
"""


def test_a_form_compiles_within_a_second_of_cpu_time_and_256_mib_after_all_others() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(msgspec.msgpack.encode(answer_form({})))
        command = [sys.executable, "-c", LIMITS]
        told = subprocess.run(
            command, stdin=theirs.fileno(), capture_output=True, text=True, check=True
        ).stdout
    cpu_s, room_mib, nicer, stack_mib, cpu_after_s = map(float, told.split())
    assert 0 < cpu_s < 1.1  # the kernel rounds up
    assert 240 < room_mib <= 256
    assert (nicer, stack_mib) == (min(5, 19 - os.getpriority(os.PRIO_PROCESS, 0)), 1)
    assert cpu_after_s == 0, "what the form's answers fork costs nothing"


class CpuTimeLeft:
    """A stand-in for an LLMatcher, whose first step takes `first_s` of CPU time and the others none."""

    def __init__(self, first_s: float = 0.0) -> None:
        self.left_s: list[float] = []
        self._first_s = first_s

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        return len(token_ids)

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False

    def compute_bitmask(self) -> bytes:
        self.left_s.append(signal.getitimer(signal.ITIMER_PROF)[0])
        end_s = time.process_time() + self._first_s
        while len(self.left_s) == 1 and time.process_time() < end_s:
            pass
        return b"\xff"


@pytest.mark.parametrize("first_s", [0.0, 0.3])
def test_an_answers_cpu_time_is_used_up_and_comes_back_but_no_more_is_saved_up(first_s: float) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    matcher = CpuTimeLeft(first_s)
    with ours, theirs:
        for _ in range(50):
            theirs.send(msgspec.msgpack.encode(Read(b"", asks=True)))
        theirs.shutdown(socket.SHUT_WR)
        _hold_answer(ours, matcher)  # type: ignore[arg-type]  # a stand-in
    assert len(matcher.left_s) == 50
    assert max(matcher.left_s) < 1.1
    assert matcher.left_s[1] < 1.1 - first_s
    # The kernel's rounding alone gives 4 ms for each step.
    assert matcher.left_s[-1] > matcher.left_s[1] + 0.8 * first_s - 0.02
