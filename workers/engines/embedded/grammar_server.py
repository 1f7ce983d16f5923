"""The processes that enforce forms, so that no schema can stop or slow the engine.

`python -m workers.engines.embedded.grammar_server TOKENIZER VOCAB_SIZE` loads the tokenizer and forks a
process for each form it receives. That process compiles the form and forks one for each answer, which reads
the answer's tokens and replies with those that may follow. A process ends when the other end of its socket
closes, when its CPU time is exhausted, or when the library fails: a small schema can keep it busy for hours
or overflow its stack.
"""

import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Final, NoReturn

import msgspec
from llguidance import LLMatcher, LLTokenizer

from baton.errors import InvalidRequest
from baton.messages import Guided
from workers.engines.embedded.grammar_compile import compile_form, reason

SERVER_MODULE: Final = "workers.engines.embedded.grammar_server"
MAX_MESSAGE_BYTES: Final = 192 << 10
"""The maximum message size of these sockets; the kernel's usual limit is 208 KiB."""
READY: Final = b"ready"
BUSY: Final = b"busy"
COMPILE_CPU_S: Final = 1.0
MEMORY_BYTES: Final = 256 << 20
# CPU time of one answer: this much at once and, after that, this much per step.
_ANSWER_CPU_S = 1.0
_STEP_CPU_S = 0.01
# Less than a thread of the answer's process has, so that what compiles here can be followed there.
_STACK_BYTES = 1 << 20
_COMPILE_NICENESS = 5


class Verdict(msgspec.Struct, frozen=True):
    """Whether a form can be enforced; else `refusal` says why and `param` where."""

    refusal: str = ""
    param: str | None = None


class Read(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of the answer, as little-endian u32. `asks` requests a mask."""

    token_ids: bytes
    asks: bool = False


class Next(msgspec.Struct, frozen=True, array_like=True):
    """`mask` has a bit for each token that may follow. Empty: any may, since the form is complete or, with a
    `problem`, cannot be followed further.
    """

    mask: bytes = b""
    problem: str = ""


def main() -> None:
    """Serve the socket at file descriptor 0. The first message says what is wrong with the tokenizer, if
    anything.
    """
    control = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # not waited for: their sockets tell when they end
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        tokenizer = LLTokenizer(sys.argv[1], n_vocab=int(sys.argv[2]))
    except ValueError as error:
        control.send(str(error).encode())
        return
    control.send(READY)
    _fork_for_each(control, partial(_hold_form, tokenizer=tokenizer))


def _fork_for_each(control: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Fork a child for each socket that arrives, until `control` is closed at the other end."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            try:
                is_child = os.fork() == 0
            except OSError:  # out of memory or processes, which is not the form's fault
                connection.send(BUSY)
                continue
            if is_child:
                control.close()
                _serve_and_exit(serve, connection)


def _serve_and_exit(serve: Callable[[socket.socket], None], connection: socket.socket) -> NoReturn:
    try:
        serve(connection)
    except OSError:  # the other end is closed
        pass
    except BaseException:  # noqa: BLE001 process edge
        traceback.print_exc()
    finally:
        os._exit(0)  # skip the parent's buffers and exit handlers


def _hold_form(connection: socket.socket, tokenizer: LLTokenizer) -> None:
    form = msgspec.msgpack.decode(connection.recv(MAX_MESSAGE_BYTES), type=Guided)
    _limit_memory()
    compiled: list[LLMatcher] = []
    verdict = Verdict()

    def compile_here() -> None:
        nonlocal verdict
        os.nice(_COMPILE_NICENESS)  # for this thread only
        try:
            compiled.append(compile_form(tokenizer, form))
        except InvalidRequest as error:
            verdict = Verdict(error.message, error.param)

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=compile_here)
    signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)  # SIGPROF ends the process
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    connection.send(msgspec.msgpack.encode(verdict))
    for matcher in compiled:
        _fork_for_each(connection, partial(_hold_answer, matcher=matcher))


def _hold_answer(connection: socket.socket, matcher: LLMatcher) -> None:
    connection.send(READY)
    left_s = _ANSWER_CPU_S
    end: Next | None = None
    while message := connection.recv(MAX_MESSAGE_BYTES):
        signal.setitimer(signal.ITIMER_PROF, min(left_s + _STEP_CPU_S, _ANSWER_CPU_S))
        read = msgspec.msgpack.decode(message, type=Read)
        end = end or _end(matcher, memoryview(read.token_ids).cast("I").tolist())
        reply = (end or _next(matcher)) if read.asks else None
        left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        if reply is not None:
            connection.send(msgspec.msgpack.encode(reply))


def _end(matcher: LLMatcher, token_ids: list[int]) -> Next | None:
    """Read tokens; returns the final reply when the following tokens are not constrained."""
    num_fitting = matcher.try_consume_tokens(token_ids)
    if matcher.is_error():
        return Next(problem=reason(matcher))
    if matcher.is_stopped():
        return Next()
    return Next(problem="the answer so far does not match it") if num_fitting < len(token_ids) else None


def _next(matcher: LLMatcher) -> Next:
    mask = matcher.compute_bitmask()
    return Next(problem=reason(matcher)) if matcher.is_error() else Next(mask)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as sizes:
        num_pages = int(sizes.read().split()[5])  # data and stack
    limit_bytes = num_pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


if __name__ == "__main__":
    main()
