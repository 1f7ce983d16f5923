"""Guided decoding: a bounded pool of processes compiles forms and follows answers (see `grammar_process`)."""

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, InvalidRequest, NotReady, Overloaded
from baton.messages import Guided
from workers.engines.embedded.grammar_process import (
    CPU_S,
    MAX_FORM_BYTES,
    MAX_MESSAGE_BYTES,
    MEMORY_BYTES,
    NOT_HELD,
    READY,
    SERVER_MODULE,
    Ask,
    Next,
    schema_param,
)

_LOG = logging.getLogger(__name__)
_NUM_PROCESSES = 8
_TOKENS_AT_ONCE = 16_384
_RETRY_AFTER_S = 1.0
_SLOW_S = 0.05
# Other answers may have used up the memory of the first process.
_NUM_ATTEMPTS = 3
_TOO_SLOW = (
    f"The schemas take more than {CPU_S:g} s of CPU time or {MEMORY_BYTES >> 20} MiB of memory, "
    "or are nested too deeply; simplify them."
)


class Grammars:
    """Enforces forms for the tokenizer of one model.

    Answers of one form share a process, but go to another one rather than wait for a slow call. A call that
    exhausts its CPU time or crashes ends its process and its own request only.
    """

    def __init__(self, model_path: Path, vocab_size: int) -> None:
        """Load `tokenizer.json`, about a second for gpt-oss; without one, guided requests are refused.

        Raises ValueError if the file is not a tokenizer for a model with logits [vocab_size].
        """
        self._tokenizer = model_path / "tokenizer.json"
        self._vocab_size = vocab_size
        self._starting = asyncio.Lock()
        self._is_closed = False
        self._lanes: list[_Lane] = []
        if self._tokenizer.is_file():
            self._start()

    async def matcher(self, form: Guided, answer: Sequence[int] = ()) -> "Matcher":
        """A matcher that has followed `answer`.

        Raises InvalidRequest for a form that cannot be enforced, Overloaded if no process can be started.
        """
        if not self._lanes:
            raise InvalidRequest("The model folder has no tokenizer.json, so forms cannot be enforced.")
        if len(msgspec.msgpack.encode(form)) > MAX_FORM_BYTES:
            raise InvalidRequest(f"The schemas exceed {MAX_FORM_BYTES} bytes.", param=schema_param(form))
        matcher = Matcher(self, form, self._vocab_size)
        await matcher.follow(answer, 0)
        if matcher.error is not None:
            raise matcher.error
        return matcher

    def close(self) -> None:
        """End the processes, which have nothing to finish."""
        self._is_closed = True
        self._end()

    async def call(self, form: Guided, ask: Ask) -> Next:
        """Ask the process of this form. Raises Overloaded if none can be started, NotReady after `close`."""
        async with self._starting:
            if self._is_closed:
                raise NotReady("the engine is not running")
            if any(lane.is_lost for lane in self._lanes):
                _LOG.warning("a grammar process has ended; starting others")
                self._end()
                try:
                    await asyncio.to_thread(self._start)
                except (OSError, ValueError) as error:
                    _LOG.warning("no grammar process: %s", error)
                    raise _overloaded() from error
        while True:
            first = hash(form)
            lanes = [self._lanes[(first + i) % _NUM_PROCESSES] for i in range(_NUM_PROCESSES)]
            lane = next((lane for lane in lanes if not lane.is_slow), lanes[0])
            if await lane.is_entered():
                return await lane.call(ask)

    def _end(self) -> None:
        for lane in self._lanes:
            lane.close()
        if self._lanes:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(_NUM_PROCESSES)]
        theirs = [end.fileno() for _, end in ends]
        command = [sys.executable, "-m", SERVER_MODULE, str(self._tokenizer), str(self._vocab_size)]
        # In its own session: Ctrl-C is for the worker, which may have answers to finish.
        self._process = subprocess.Popen(  # noqa: S603 our own arguments
            [*command, *map(str, theirs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=theirs,
            start_new_session=True,
        )
        self._lanes = [_Lane(end) for end, _ in ends]
        for _, end in ends:
            end.close()
        assert self._process.stdout is not None
        with self._process.stdout as output:
            problem = output.readline().strip()
        if problem != READY:
            self._end()
            raise ValueError(problem or "the grammar process did not start")


class _Lane:
    """Calls to one process of the pool, one at a time; after `is_entered`, one `call`."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.is_lost = False
        self._end = end
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()
        self._began_s = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether a call takes so long that others should not wait for it."""
        now_s = asyncio.get_running_loop().time()
        return self._turn.locked() and now_s - self._began_s > _SLOW_S

    async def is_entered(self) -> bool:
        """Wait briefly for the turn."""
        try:
            async with asyncio.timeout(_SLOW_S):
                await self._turn.acquire()
        except TimeoutError:
            return False
        self._began_s = asyncio.get_running_loop().time()
        return True

    async def call(self, ask: Ask) -> Next:
        """The reply, or the signal that ended the process."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        try:
            await loop.sock_sendall(self._end, msgspec.msgpack.encode((number, ask)))
            while message := await loop.sock_recv(self._end, MAX_MESSAGE_BYTES):
                replied_to, reply = msgspec.msgpack.decode(message, type=tuple[int, Next])
                if reply.signal > 0 or replied_to == number:
                    return reply
        except OSError:
            pass
        finally:
            self._turn.release()
        self.close()
        return Next(signal=signal.SIGKILL)

    def close(self) -> None:
        """End the process."""
        self.is_lost = True
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        if not self._turn.locked():
            self._end.close()


class Matcher:
    """Follows one answer in its form.

    Once it `is_ready`, `allowed` [vocab] says which tokens may come next; None: all, since the form is
    complete or, with an `error`, cannot be followed further.
    """

    _ids = itertools.count()

    def __init__(self, grammars: Grammars, form: Guided, vocab_size: int) -> None:
        self.error: BatonError | None = None
        self.is_ready = False
        self.allowed: npt.NDArray[np.bool_] | None = None
        self._grammars = grammars
        self._form = form
        self._vocab_size = vocab_size
        self._id = next(self._ids)
        self._num_sent: int | None = None  # None: no process holds the answer
        self._is_over = False

    def follow(self, token_ids: Sequence[int], num_prompt: int) -> "asyncio.Future[None]":
        """Find out what may come after `token_ids`, whose first `num_prompt` are the prompt. To cancel the
        result does not cancel the work.
        """
        self.is_ready = self._is_over
        return asyncio.shield(asyncio.ensure_future(self._follow(token_ids, num_prompt)))

    def close(self) -> None:
        """Follow no further."""
        self._is_over = True

    async def _follow(self, token_ids: Sequence[int], num_prompt: int) -> None:
        num_failures = 0
        while not self._is_over:
            start = num_prompt + (self._num_sent or 0)
            form, size = (self._form, 0) if self._num_sent is None else (None, _TOKENS_AT_ONCE)
            piece = np.array(token_ids[start : start + size], "<u4")
            try:
                reply = await self._grammars.call(
                    self._form, Ask(self._id, self._num_sent or 0, piece.tobytes(), form)
                )
            except BatonError as error:
                self._end(error)
                break
            if reply.signal:
                self._num_sent = None
                if reply.signal != NOT_HELD:
                    num_failures += 1
                    self._judge(reply.signal, num_failures)
                continue
            self._num_sent = (self._num_sent or 0) + len(piece)
            self._read(reply)
            if start + len(piece) == len(token_ids):
                break
        self.is_ready = True

    def _judge(self, ended_by: int, num_failures: int) -> None:
        """End the answer if its process ended because of it, or as often as it was tried."""
        if ended_by == signal.SIGPROF or (num_failures == _NUM_ATTEMPTS and ended_by != signal.SIGKILL):
            self._end(InvalidRequest(_TOO_SLOW, param=schema_param(self._form)))
        elif num_failures == _NUM_ATTEMPTS:
            self._end(_overloaded())

    def _read(self, reply: Next) -> None:
        if reply.mask:
            bits = np.frombuffer(reply.mask, np.uint8)
            self.allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        else:
            param = reply.param or schema_param(self._form)
            self._end(InvalidRequest(reply.refusal, param=param) if reply.refusal else None)

    def _end(self, error: BatonError | None) -> None:
        self._is_over = True
        self.error, self.allowed = error, None


def _overloaded() -> Overloaded:
    return Overloaded("No process can enforce the form.", retry_after_s=_RETRY_AFTER_S)
