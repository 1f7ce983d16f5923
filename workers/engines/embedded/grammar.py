"""Guided decoding: a bounded pool of processes compiles forms and follows answers (see `grammar_process`)."""

import asyncio
import itertools
import logging
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, InvalidRequest, NotReady
from baton.messages import Guided
from workers.engines.embedded.grammar_process import (
    CPU_S,
    MEMORY_BYTES,
    READY,
    Ask,
    Next,
    framed,
    schema_param,
)

_LOG = logging.getLogger(__name__)
_NUM_PROCESSES = 8
# New answers take at most these at a time, since slow schemas come with them; running ones have the others.
_NUM_FOR_NEW = 6
_MAX_FORM_BYTES = 192 << 10  # each call carries it
_RETRY_AFTER_S = 1.0
# Other answers may have used up the memory of the first process; the next one is new.
_NUM_ATTEMPTS = 2
_HUNG_S = 30.0
_KILLED = "The system ended the process that enforces the form: the machine may be out of memory."
_TOO_SLOW = (
    f"The schemas take more than {CPU_S:g} s of CPU time or {MEMORY_BYTES >> 20} MiB of memory, "
    "or are nested too deeply; simplify them."
)


class Grammars:
    """Enforces forms for the tokenizer of one model.

    An answer prefers one process, but takes another one rather than wait. A call carries all that a process
    needs, so that any can serve it. One that exhausts its CPU time or crashes ends its process and its own
    request only."""

    def __init__(self, model_path: Path, vocab_size: int) -> None:
        """Load `tokenizer.json`, about a second for gpt-oss; without one, guided requests are refused.

        Raises ValueError if the file is not a tokenizer for a model with logits [vocab_size]."""
        self._tokenizer = model_path / "tokenizer.json"
        self._vocab_size = vocab_size
        self._is_closed = False
        self._starting = asyncio.Lock()
        self._turns = asyncio.Semaphore(_NUM_PROCESSES)
        self._turns_of_new = asyncio.Semaphore(_NUM_FOR_NEW)
        self._idle = set(range(_NUM_PROCESSES))
        self._streams: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._parent: subprocess.Popen[str] | None = None
        self._sockets: socket.socket  # the parent forks a process for each that it gets over this one
        if self._tokenizer.is_file():
            self._start()

    async def matcher(self, form: Guided, answer: Sequence[int] = ()) -> "Matcher":
        """A matcher that has followed `answer`.

        Raises InvalidRequest for a form that cannot be enforced, NotReady if no process can be started."""
        if self._parent is None:
            raise InvalidRequest("The model folder has no tokenizer.json, so forms cannot be enforced.")
        matcher = Matcher(self, form, self._vocab_size)
        await matcher.follow(answer, 0)
        if matcher.error is not None:
            raise matcher.error
        return matcher

    def close(self) -> None:
        """End the processes, which have nothing to finish."""
        self._is_closed = True
        for _, writer in self._streams.values():
            writer.close()
        self._end_parent()

    async def call(self, ask: Ask) -> Next:
        """The reply. Raises NotReady if no process starts, if the system kills it, and after `close`."""
        async with nullcontext() if ask.token_ids else self._turns_of_new, self._turns:
            place = min(self._idle, key=lambda each: (each - ask.answer_id) % _NUM_PROCESSES)
            self._idle.remove(place)
            try:
                for _ in range(_NUM_ATTEMPTS):
                    reply = await self._call(place, ask)
                    if reply.ended_by in (0, -signal.SIGPROF):
                        break
            finally:
                self._idle.add(place)
        if reply.ended_by == -signal.SIGKILL:
            raise NotReady(_KILLED, retry_after_s=_RETRY_AFTER_S)
        return reply

    async def _call(self, place: int, ask: Ask) -> Next:
        """The reply of the process at a place. One that hangs, or ends without it, counts as killed. One
        whose end it reports is replaced: if it ended before the call, the reply to the call comes later."""
        assert self._parent is not None
        try:
            if place not in self._streams:
                self._streams[place] = await self._forked()
            reader, writer = self._streams[place]
            async with asyncio.timeout(_HUNG_S):
                writer.write(framed(ask))
                size = int.from_bytes(await reader.readexactly(4), "little")
                reply = msgspec.msgpack.decode(await reader.readexactly(size), type=Next)
            if not reply.ended_by:
                return reply
        except (OSError, EOFError) as error:
            _LOG.warning("grammar process lost: %r", error)
            reply = Next(ended_by=-signal.SIGKILL)
            if isinstance(error, TimeoutError):
                self._parent.kill()  # it may be what hangs
                await asyncio.to_thread(self._parent.wait)
        if lost := self._streams.pop(place, None):
            lost[1].close()
        return reply

    async def _forked(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The stream of a new process. Raises OSError, NotReady."""
        async with self._starting:
            assert self._parent is not None
            if self._parent.poll() is not None and not self._is_closed:
                _LOG.warning("the parent of the grammar processes was killed; another one starts")
                try:
                    await asyncio.to_thread(self._start)
                except ValueError as error:
                    _LOG.warning("no grammar process: %s", error)
                    raise NotReady(
                        "No process can enforce the form.", retry_after_s=_RETRY_AFTER_S
                    ) from error
            if self._is_closed:
                self._end_parent()
                raise NotReady("the engine is not running")
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    socket.send_fds(self._sockets, [b"."], [theirs.fileno()])
            except OSError:  # the parent has just ended
                ours.close()
                raise
            return await asyncio.open_unix_connection(sock=ours)

    def _start(self) -> None:
        """Start the parent. Raises ValueError if the tokenizer does not fit, OSError."""
        self._end_parent()
        self._sockets, theirs = socket.socketpair()
        with theirs:
            # In its own session: Ctrl-C is for the worker, which may have answers to finish.
            self._parent = subprocess.Popen(  # noqa: S603 our own arguments
                [sys.executable, "-m", Ask.__module__, str(self._tokenizer), str(self._vocab_size)],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                start_new_session=True,
                text=True,
            )
        assert self._parent.stdout is not None
        with self._parent.stdout as written:
            problem = written.readline()
        if problem != READY:
            self._end_parent()
            raise ValueError(problem.strip() or "the grammar process did not start")

    def _end_parent(self) -> None:
        if self._parent is not None:
            self._sockets.close()
            self._parent.kill()
            self._parent.wait()


class Matcher:
    """Follows one answer in its form.

    Once it `is_ready`, `allowed` [vocab] says which tokens may come next; None: all, since the form is
    complete or, with an `error`, cannot be followed further."""

    _ids = itertools.count()

    def __init__(self, grammars: Grammars, form: Guided, vocab_size: int) -> None:
        """Raises InvalidRequest for a form that is too large."""
        encoded = msgspec.msgpack.encode(form)
        if len(encoded) > _MAX_FORM_BYTES:
            raise InvalidRequest(f"The schemas exceed {_MAX_FORM_BYTES} bytes.", param=schema_param(form))
        self.error: BatonError | None = None
        self.is_ready = False
        self.allowed: npt.NDArray[np.bool_] | None = None
        self._grammars = grammars
        self._form = form
        self._encoded = msgspec.Raw(encoded)
        self._vocab_size = vocab_size
        self._id = next(self._ids)
        self._token_ids = array("I")

    def follow(self, token_ids: Sequence[int], num_prompt: int) -> "asyncio.Future[None]":
        """Find out what may come after `token_ids`, whose first `num_prompt` are the prompt and the next ones
        those of the last call. To cancel the result does not cancel the work."""
        self.is_ready = self.is_ready and self.allowed is None
        self._token_ids.extend(token_ids[num_prompt + len(self._token_ids) :])
        return asyncio.shield(asyncio.ensure_future(self._follow()))

    async def _follow(self) -> None:
        if not self.is_ready:
            try:
                self.allowed = await self._next()
            except BatonError as error:
                self.error, self.allowed = error, None
        self.is_ready = True

    async def _next(self) -> npt.NDArray[np.bool_] | None:
        reply = await self._grammars.call(Ask(self._id, self._encoded, self._token_ids.tobytes()))
        refusal = _TOO_SLOW if reply.ended_by else reply.refusal
        if refusal:
            raise InvalidRequest(refusal, param=reply.param or schema_param(self._form))
        if not reply.mask:
            return None
        bits = np.frombuffer(reply.mask, np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
