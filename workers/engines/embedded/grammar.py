"""Guided decoding: compiles and caches forms, each in its own process."""

import asyncio
import logging
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.errors import InvalidRequest, Overloaded
from baton.messages import Guided
from workers.engines.embedded.grammar_compile import schema_param
from workers.engines.embedded.grammar_server import (
    BUSY,
    COMPILE_CPU_S,
    MAX_MESSAGE_BYTES,
    MEMORY_BYTES,
    READY,
    SERVER_MODULE,
    Verdict,
)
from workers.engines.embedded.matcher import Matcher

_LOG = logging.getLogger(__name__)
_NUM_KEPT = 32
# Concurrent compilations; they share the CPU, so that a small form finishes before a large one.
_NUM_COMPILING = 8
_PATIENCE_S = 60.0
_RETRY_AFTER_S = 1.0
_TOO_LONG = (
    f"The schemas take more than {COMPILE_CPU_S:g} s of CPU time or {MEMORY_BYTES >> 20} MiB of memory to "
    "compile, or are nested too deeply; simplify them."
)


class Grammars:
    """Compiles forms for one tokenizer and caches the most recent: processes, or refusals."""

    def __init__(self, server: "_Server | None", vocab_size: int) -> None:
        self._server = server
        self._vocab_size = vocab_size
        self._known: OrderedDict[Guided, socket.socket | InvalidRequest] = OrderedDict()
        self._compiling: dict[Guided, asyncio.Task[socket.socket | InvalidRequest]] = {}
        self._places = asyncio.Semaphore(_NUM_COMPILING)

    @classmethod
    def load(cls, model_path: Path, vocab_size: int) -> "Grammars":
        """Load `tokenizer.json`, about a second for gpt-oss; without one, guided requests are refused.

        Raises ValueError if the file is not a tokenizer for a model with logits [vocab_size].
        """
        path = model_path / "tokenizer.json"
        return cls(_Server(path, vocab_size) if path.is_file() else None, vocab_size)

    async def matcher(self, form: Guided, answer: Sequence[int] = ()) -> Matcher:
        """A matcher for a new answer, or for one that continues after `answer`.

        Raises InvalidRequest for a form that cannot be enforced, Overloaded if no process can be started.
        """
        if self._server is None:
            raise InvalidRequest("The model folder has no tokenizer.json, so forms cannot be enforced.")
        matcher = Matcher(await self._connection(form), self._vocab_size, schema_param(form))
        if answer:  # may be long; its process reads it piece by piece
            await asyncio.to_thread(matcher.tell, answer, 0)
        return matcher

    def close(self) -> None:
        """End the processes."""
        for form in list(self._known):
            self._forget(form)
        if self._server is not None:
            self._server.close()

    async def _connection(self, form: Guided) -> socket.socket:
        for _ in range(2):
            try:
                return await _answered(_hand_over(await self._compiled(form)))
            except OSError:
                self._forget(form)  # its process was killed: retry from the start
        raise Overloaded("No process is available to enforce the form.", retry_after_s=_RETRY_AFTER_S)

    async def _compiled(self, form: Guided) -> socket.socket:
        """The socket of the process that compiled the form. A client that disconnects does not cancel what
        others may wait for.
        """
        known = self._known.get(form)
        if known is None:
            task = self._compiling.get(form)
            if task is None:
                task = self._compiling[form] = asyncio.create_task(self._compile(form))
                task.add_done_callback(lambda task: self._keep(form, task))
            known = await asyncio.shield(task)
        else:
            self._known.move_to_end(form)
        if isinstance(known, InvalidRequest):
            raise InvalidRequest(known.message, param=known.param)
        return known

    async def _compile(self, form: Guided) -> socket.socket | InvalidRequest:
        assert self._server is not None
        try:
            async with asyncio.timeout(_PATIENCE_S), self._places:
                return await self._server.compile(form)
        except TimeoutError:
            raise Overloaded("Too many schemas are being compiled.", retry_after_s=_RETRY_AFTER_S) from None

    def _keep(self, form: Guided, task: asyncio.Task[socket.socket | InvalidRequest]) -> None:
        del self._compiling[form]
        if task.cancelled() or task.exception() is not None:
            return
        self._known[form] = task.result()
        if len(self._known) > _NUM_KEPT:
            self._forget(next(iter(self._known)))

    def _forget(self, form: Guided) -> None:
        known = self._known.pop(form, None)
        if isinstance(known, socket.socket):
            known.close()


class _Server:
    """The process that has the tokenizer (see `grammar_server`); restarted if it was killed."""

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        self._command = [sys.executable, "-m", SERVER_MODULE, str(tokenizer), str(vocab_size)]
        self._starting = asyncio.Lock()
        self._start()

    def close(self) -> None:
        """Kill the process, which has nothing to finish."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    async def compile(self, form: Guided) -> socket.socket | InvalidRequest:
        """The socket of a process that compiled the form, or the reason why it cannot."""
        async with self._starting:
            if self._has_ended():
                _LOG.warning("the grammar process has ended; starting another")
                self.close()
                await asyncio.to_thread(self._start)
        message = msgspec.msgpack.encode(form)
        if len(message) > MAX_MESSAGE_BYTES:
            return InvalidRequest(f"The schemas exceed {MAX_MESSAGE_BYTES} bytes.", param=schema_param(form))
        connection = _hand_over(self._control)
        try:
            refusal = await self._verdict(connection, message, form)
        except BaseException:
            connection.close()
            raise
        if refusal is not None:
            connection.close()
            return refusal
        return connection

    async def _verdict(
        self, connection: socket.socket, message: bytes, form: Guided
    ) -> InvalidRequest | None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        try:
            await loop.sock_sendall(connection, message)
            reply = await loop.sock_recv(connection, MAX_MESSAGE_BYTES)
        except ConnectionError:
            reply = b""
        connection.setblocking(True)
        if reply == BUSY or (not reply and self._has_ended()):
            raise Overloaded("No process is left to enforce the form.", retry_after_s=_RETRY_AFTER_S)
        if not reply:
            return InvalidRequest(_TOO_LONG, param=schema_param(form))
        verdict = msgspec.msgpack.decode(reply, type=Verdict)
        return InvalidRequest(verdict.refusal, param=verdict.param) if verdict.refusal else None

    def _has_ended(self) -> bool:
        """Whether the process ended: its socket closes before those that it was passed."""
        try:
            return not self._control.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # In its own session: Ctrl-C is for the worker, which may have answers to finish.
            self._process = subprocess.Popen(  # noqa: S603 our own arguments
                self._command, stdin=theirs.fileno(), start_new_session=True
            )
        said = self._control.recv(MAX_MESSAGE_BYTES)
        if said != READY:
            self.close()
            raise ValueError(said.decode() or "the grammar process did not start")


async def _answered(connection: socket.socket) -> socket.socket:
    """The connection once a process serves it. Raises OSError if none does, Overloaded if none can."""
    connection.setblocking(False)
    try:
        reply = await asyncio.get_running_loop().sock_recv(connection, MAX_MESSAGE_BYTES)
    except BaseException:
        connection.close()
        raise
    connection.setblocking(True)
    if reply == READY:
        return connection
    connection.close()
    if reply == BUSY:
        raise Overloaded("No process is left to enforce the form.", retry_after_s=_RETRY_AFTER_S)
    raise ConnectionResetError("the process ended")


def _hand_over(control: socket.socket) -> socket.socket:
    """Our end of a new socket pair, whose other end is passed through `control`. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            socket.send_fds(control, [b"."], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
    return ours
