"""The processes that hold answers to forms: none can stop or slow the engine, each ends by itself.

`python -m workers.engines.embedded.grammar_server TOKENIZER VOCAB_SIZE` has the tokenizer and forks a process
for each form that arrives. That compiles it and forks one for each answer, which reads the answer's tokens
and says which may follow. A process ends when the other end of its socket is closed, when its CPU time is up,
or by a fault of the library, which a small schema can keep busy for hours, or make overflow its stack.
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
"""The most that a socket of these takes at once: the kernel's usual limit is 208 KiB."""
READY: Final = b"ready"
BUSY: Final = b"busy"
COMPILE_CPU_S: Final = 1.0
MEMORY_BYTES: Final = 256 << 20
# What one answer may take: so much at once, and when that is used up, so much for each step.
_ANSWER_CPU_S = 1.0
_STEP_CPU_S = 0.01
# Less than a thread of the answer's process has: what compiles here can be followed there.
_STACK_BYTES = 1 << 20
_COMPILE_NICENESS = 5


class Verdict(msgspec.Struct, frozen=True):
    """On a form: it can be enforced, or `refusal` says why not, and `param` where."""

    refusal: str = ""
    param: str | None = None


class Read(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of the answer, as little-endian u32. `asks`: say what may follow."""

    token_ids: bytes
    asks: bool = False


class Next(msgspec.Struct, frozen=True, array_like=True):
    """`mask` has a bit for each token that may follow; empty: any may, since the form is complete or, with a
    `problem`, cannot be followed any further."""

    mask: bytes = b""
    problem: str = ""


def main() -> None:
    """Serve the socket that is file descriptor 0. The first message says what is wrong with the tokenizer."""
    control = socket.socket(fileno=0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which may have answers to finish
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child is waited for: its socket says that it ended
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        tokenizer = LLTokenizer(sys.argv[1], n_vocab=int(sys.argv[2]))
    except ValueError as error:
        control.send(str(error).encode())
        return
    control.send(READY)
    _fork_for_each(control, partial(_hold_form, tokenizer=tokenizer))


def _fork_for_each(control: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """A child serves each socket that arrives, until `control` is closed at the other end."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            try:
                is_child = os.fork() == 0
            except OSError:  # no memory or no process left: the machine's trouble, not the form's
                connection.send(BUSY)
                continue
            if is_child:
                control.close()
                _serve_and_exit(serve, connection)


def _serve_and_exit(serve: Callable[[socket.socket], None], connection: socket.socket) -> NoReturn:
    try:
        serve(connection)
    except OSError:  # the other end has left: nothing to say, and no one to say it to
        pass
    except BaseException:  # noqa: BLE001 the edge of this process
        traceback.print_exc()
    finally:
        os._exit(0)  # nothing of the parent's is flushed or run at exit


def _hold_form(connection: socket.socket, tokenizer: LLTokenizer) -> None:
    form = msgspec.msgpack.decode(connection.recv(MAX_MESSAGE_BYTES), type=Guided)
    _limit_memory()
    compiled: list[LLMatcher] = []
    verdict = Verdict()

    def compile_here() -> None:
        nonlocal verdict
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _COMPILE_NICENESS)  # this thread's alone
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
    """Read tokens; what there is to say if nothing after them is held to the form."""
    num_fitting = matcher.try_consume_tokens(token_ids)
    if matcher.is_error():
        return Next(problem=reason(matcher))
    if matcher.is_stopped():
        return Next()
    return Next(problem="the answer so far does not have it") if num_fitting < len(token_ids) else None


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
