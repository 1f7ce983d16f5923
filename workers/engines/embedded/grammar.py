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
from contextlib import nullcontext, suppress
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
    request only.
    """

    def __init__(self, model_path: Path, vocab_size: int) -> None:
        """Load `tokenizer.json`, about a second for gpt-oss; without one, guided requests are refused.

        Raises ValueError if the file is not a tokenizer for a model with logits [vocab_size].
        """
        self._tokenizer = model_path / "tokenizer.json"
        self._vocab_size = vocab_size
        self._is_closed = False
        self._starting = asyncio.Lock()
        self._turns = asyncio.Semaphore(_NUM_PROCESSES)
        self._turns_of_new = asyncio.Semaphore(_NUM_FOR_NEW)
        self._idle = set(range(_NUM_PROCESSES))
        self._processes = _Processes(self._tokenizer, vocab_size) if self._tokenizer.is_file() else None

    async def matcher(self, form: Guided, answer: Sequence[int] = ()) -> "Matcher":
        """A matcher that has followed `answer`.

        Raises InvalidRequest for a form that cannot be enforced, NotReady if no process can be started.
        """
        if self._processes is None:
            raise InvalidRequest("The model folder has no tokenizer.json, so forms cannot be enforced.")
        matcher = Matcher(self, form, self._vocab_size)
        await matcher.follow(answer, 0)
        if matcher.error is not None:
            raise matcher.error
        return matcher

    def close(self) -> None:
        """End the processes, which have nothing to finish."""
        self._is_closed = True
        if self._processes is not None:
            self._processes.close()

    async def call(self, ask: Ask) -> Next:
        """The reply. Raises NotReady if no process starts, if the system kills it, and after `close`."""
        async with nullcontext() if ask.token_ids else self._turns_of_new, self._turns:
            place = min(self._idle, key=lambda each: (each - ask.answer_id) % _NUM_PROCESSES)
            self._idle.remove(place)
            try:
                return await self._call(place, ask)
            except (OSError, ValueError) as error:
                _LOG.warning("no grammar process: %s", error)
                raise NotReady("No process can enforce the form.", retry_after_s=_RETRY_AFTER_S) from error
            finally:
                self._idle.add(place)

    async def _call(self, place: int, ask: Ask) -> Next:
        for _ in range(_NUM_ATTEMPTS):
            processes = await self._running()
            reply = await processes.call(place, ask)
            if reply is None:
                processes.close()
            elif reply.ended_by in (0, -signal.SIGPROF):
                break
        if reply is None:
            raise NotReady(_KILLED, retry_after_s=_RETRY_AFTER_S)
        return reply

    async def _running(self) -> "_Processes":
        assert self._processes is not None
        async with self._starting:
            if self._processes.is_closed and not self._is_closed:
                _LOG.warning("a grammar process was killed; all are started again")
                self._processes = await asyncio.to_thread(_Processes, self._tokenizer, self._vocab_size)
            if self._is_closed:
                self._processes.close()
                raise NotReady("the engine is not running")
            return self._processes


class _Processes:
    """A process for each place, forked from one that has the tokenizer."""

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        """Raises ValueError if the tokenizer does not fit, OSError."""
        self.is_closed = False
        self._streams: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        pairs = [socket.socketpair() for _ in range(_NUM_PROCESSES)]
        self._sockets = {place: ours for place, (ours, _) in enumerate(pairs)}
        filenos = [theirs.fileno() for _, theirs in pairs]
        # In its own session: Ctrl-C is for the worker, which may have answers to finish.
        self._parent = subprocess.Popen(  # noqa: S603 our own arguments
            [sys.executable, "-m", Ask.__module__, str(tokenizer), str(vocab_size), *map(str, filenos)],
            pass_fds=filenos,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        for _, theirs in pairs:
            theirs.close()
        assert self._parent.stdout is not None
        with self._parent.stdout as written:
            problem = written.readline()
        if problem != READY:
            self.close()
            raise ValueError(problem.strip() or "the grammar process did not start")

    async def call(self, place: int, ask: Ask) -> Next | None:
        """The reply; None if the process hangs or the system killed it. Raises OSError."""
        if place not in self._streams:
            sock = self._sockets.pop(place)
            self._streams[place] = await asyncio.open_unix_connection(sock=sock)
        reader, writer = self._streams[place]
        if self.is_closed:
            writer.close()
        with suppress(OSError, EOFError):
            async with asyncio.timeout(_HUNG_S):
                writer.write(framed(ask))
                size = int.from_bytes(await reader.readexactly(4), "little")
                reply = msgspec.msgpack.decode(await reader.readexactly(size), type=Next)
                return None if reply.ended_by == -signal.SIGKILL else reply
        return None

    def close(self) -> None:
        """End all of them; idempotent."""
        self.is_closed = True
        for sock in self._sockets.values():
            sock.close()
        for _, writer in self._streams.values():
            writer.close()
        self._parent.kill()
        self._parent.wait()


class Matcher:
    """Follows one answer in its form.

    Once it `is_ready`, `allowed` [vocab] says which tokens may come next; None: all, since the form is
    complete or, with an `error`, cannot be followed further.
    """

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
        self._is_over = False

    def follow(self, token_ids: Sequence[int], num_prompt: int) -> "asyncio.Future[None]":
        """Find out what may come after `token_ids`, whose first `num_prompt` are the prompt and the next ones
        those of the last call. To cancel the result does not cancel the work.
        """
        self.is_ready = self._is_over
        self._token_ids.extend(token_ids[num_prompt + len(self._token_ids) :])
        return asyncio.shield(asyncio.ensure_future(self._follow()))

    async def _follow(self) -> None:
        if not self._is_over:
            try:
                self.allowed = await self._next()
            except BatonError as error:
                self.error, self.allowed = error, None
        self._is_over = self.allowed is None
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
