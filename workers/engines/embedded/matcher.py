"""The engine's end of the process that enforces one answer's form."""

import contextlib
import socket
import weakref
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, InvalidRequest
from workers.engines.embedded.grammar_server import MAX_MESSAGE_BYTES, Next, Read

_TOKENS_AT_ONCE = 16_384
_TOO_SLOW = "it takes too much CPU time or memory; simplify the schemas"


class Matcher:
    """Tracks one answer in its form. `error` says why it cannot be followed further.

    Call `ask`, wait until the socket `fileno` is readable, call `receive`: then `is_ready` is true and
    `allowed` returns the mask. Otherwise `allowed` does all of this and blocks.
    """

    def __init__(self, connection: socket.socket, vocab_size: int, param: str | None) -> None:
        self.error: BatonError | None = None
        self.is_ready = False
        self.close = weakref.finalize(self, connection.close)
        self._connection = connection
        self._vocab_size = vocab_size
        self._param = param
        self._num_sent = 0
        self._mask = b""
        self._is_over = False

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._connection.fileno()

    def ask(self, token_ids: Sequence[int], num_prompt: int) -> None:
        """Ask which tokens may follow `token_ids`, whose first `num_prompt` are the prompt."""
        self.is_ready = self._is_over
        self._tell(token_ids, num_prompt, asks=True)

    def tell(self, token_ids: Sequence[int], num_prompt: int) -> None:
        """Send tokens ahead of `ask`; may block if they are many."""
        self._tell(token_ids, num_prompt, asks=False)

    def _tell(self, token_ids: Sequence[int], num_prompt: int, *, asks: bool) -> None:
        """Send the tokens since the last call: one in a running answer, all in an answer that another worker
        began.
        """
        answer = np.array(token_ids[num_prompt + self._num_sent :], "<u4")
        self._num_sent += len(answer)
        if self._is_over:
            return
        for i in range(0, len(answer) or 1, _TOKENS_AT_ONCE):
            is_last = i + _TOKENS_AT_ONCE >= len(answer)
            self._send(Read(answer[i : i + _TOKENS_AT_ONCE].tobytes(), asks=asks and is_last))

    def _send(self, read: Read) -> None:
        with contextlib.suppress(OSError):  # if the process has ended, `receive` reports it
            self._connection.send(msgspec.msgpack.encode(read))

    def receive(self) -> None:
        """Receive the reply to `ask`; blocks."""
        self.is_ready = True
        try:
            message = self._connection.recv(MAX_MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:
            self._is_over = True
            self.error = self._invalid(_TOO_SLOW)
            return
        reply = msgspec.msgpack.decode(message, type=Next)
        self._mask, self._is_over = reply.mask, not reply.mask
        if reply.problem:
            self.error = self._invalid(reply.problem)

    def allowed(self, token_ids: Sequence[int], num_prompt: int) -> npt.NDArray[np.bool_] | None:
        """[vocab]: whether a token may follow `token_ids`. None: any may, since the form is complete or
        `error` is set.
        """
        if self._num_sent < len(token_ids) - num_prompt or not self.is_ready:
            self.ask(token_ids, num_prompt)
            if not self.is_ready:
                self.receive()
        if self._is_over:
            return None
        bits = np.frombuffer(self._mask, np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _invalid(self, problem: str) -> InvalidRequest:
        return InvalidRequest(
            f"The demanded form cannot be enforced any further: {problem}.", param=self._param
        )
