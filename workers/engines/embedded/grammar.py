"""Guided decoding: a bounded pool of processes compiles forms and follows answers (see `grammar_process`)."""

import asyncio
import itertools
import logging
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
    KILLED,
    MEMORY_BYTES,
    READY,
    SERVER_MODULE,
    STARTED,
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
# The first process may have ended before, or other answers have used up its memory; the next one is new.
_NUM_ATTEMPTS = 2
# A process that ends sooner did not exhaust its CPU time.
_SLOW_S = 0.9 * CPU_S
_HUNG_S = 30.0
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_KILLED = "The system ended the process that enforces the form: the machine may be out of memory."
_TOO_SLOW = (
    f"The schemas take more than {CPU_S:g} s of CPU time or {MEMORY_BYTES >> 20} MiB of memory, "
    "or are nested too deeply; simplify them."
)


class Grammars:
    """Enforces forms for the tokenizer of one model.

    Answers of one form prefer the process that has compiled it, but take another one rather than wait. A call
    carries all that a process needs, so that any can serve it. One that exhausts its CPU time, hangs or
    crashes ends its process and its own request only.
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
        self._streams: dict[int, _Streams] = {}
        self._parent = _Parent(self._tokenizer, vocab_size) if self._tokenizer.is_file() else None

    async def matcher(self, form: Guided, answer: Sequence[int] = ()) -> "Matcher":
        """A matcher that has followed `answer`.

        Raises InvalidRequest for a form that cannot be enforced, NotReady if no process can be started.
        """
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
        if self._parent is not None:
            self._parent.close()

    async def call(self, ask: Ask) -> Next | None:
        """The reply; None if `ask` ends its process. Raises NotReady if none can be started, if the
        system kills it, and after `close`.
        """
        async with nullcontext() if ask.token_ids else self._turns_of_new, self._turns:
            first = hash(bytes(ask.form))
            place = min(self._idle, key=lambda each: (each - first) % _NUM_PROCESSES)
            self._idle.remove(place)
            try:
                return await self._call(place, ask)
            except (OSError, ValueError) as error:
                _LOG.warning("no grammar process: %s", error)
                raise NotReady("No process can enforce the form.", retry_after_s=_RETRY_AFTER_S) from error
            finally:
                self._idle.add(place)

    async def _call(self, place: int, ask: Ask) -> Next | None:
        loop, is_killed = asyncio.get_running_loop(), False
        for _ in range(_NUM_ATTEMPTS):
            is_killed = False
            if place not in self._streams:
                self._streams[place] = await self._connect()
            reader, writer = self._streams[place]
            began_s = loop.time()
            with suppress(OSError, EOFError):
                async with asyncio.timeout(_HUNG_S):
                    writer.write(framed(ask))
                    head = await reader.readexactly(4)
                    is_killed = head == KILLED
                    if not is_killed:
                        size = int.from_bytes(head, "little")
                        return msgspec.msgpack.decode(await reader.readexactly(size), type=Next)
            writer.close()
            self._streams.pop(place, None)
            if loop.time() - began_s > _SLOW_S and not self._is_closed:
                break
        if is_killed:
            raise NotReady(_KILLED, retry_after_s=_RETRY_AFTER_S)
        return None

    async def _connect(self) -> _Streams:
        assert self._parent is not None
        async with self._starting:
            while not self._is_closed:
                reader, writer = await asyncio.open_unix_connection(sock=self._parent.forked())
                first = b""
                with suppress(TimeoutError):
                    async with asyncio.timeout(_HUNG_S):
                        first = await reader.read(1)
                if first == STARTED and not self._is_closed:
                    return reader, writer
                writer.close()
                if first == KILLED[:1]:
                    raise NotReady(_KILLED, retry_after_s=_RETRY_AFTER_S)
                await self._restart()
        self._parent.close()
        raise NotReady("the engine is not running")

    async def _restart(self) -> None:
        if self._parent is None or self._is_closed:
            return
        _LOG.warning("a grammar process has ended; starting another")
        self._parent.close()
        self._parent = await asyncio.to_thread(_Parent, self._tokenizer, self._vocab_size)


class _Parent:
    """The process that has the tokenizer and forks the others."""

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        """Raises ValueError if the tokenizer does not fit, OSError."""
        self._control, theirs = socket.socketpair()
        with theirs:
            # In its own session: Ctrl-C is for the worker, which may have answers to finish.
            self._process = subprocess.Popen(  # noqa: S603 our own arguments
                [sys.executable, "-m", SERVER_MODULE, str(tokenizer), str(vocab_size)],
                stdin=theirs.fileno(),
                start_new_session=True,
            )
        problem = self._control.recv(4096).decode()
        if problem != READY:
            self.close()
            raise ValueError(problem or "the grammar process did not start")

    def forked(self) -> socket.socket:
        """A connection to a new process, which sends a byte first; closed if there is none."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """End the process, not those that it forked."""
        self._control.close()
        self._process.kill()
        self._process.wait()


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
        if reply is None:
            raise InvalidRequest(_TOO_SLOW, param=schema_param(self._form))
        if reply.refusal:
            raise InvalidRequest(reply.refusal, param=reply.param or schema_param(self._form))
        if not reply.mask:
            return None
        bits = np.frombuffer(reply.mask, np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
