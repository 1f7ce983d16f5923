"""The open message: turns its tokens' bytes into deltas of one kind."""

import enum
from collections.abc import Sequence

from frontend.harmony.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments
from frontend.text.detokenize import IncrementalDecoder


class Kind(enum.Enum):
    """How a message appears to the client."""

    REASONING = enum.auto()
    TEXT = enum.auto()
    PREAMBLE = enum.auto()
    CALL = enum.auto()
    DROPPED = enum.auto()  # written as another author


class OpenMessage:
    """`call_index` is the call's index in the answer, `position` that of the message's first token.

    Every token belongs to the delta that contains its last byte, so a delta's tokens start where those of the
    previous delta ended. `has_spoken` is set after any text; `num_tokens` includes tokens without text.
    """

    def __init__(self, kind: Kind, call_index: int, position: int) -> None:
        self.kind = kind
        self.has_spoken = False
        self.num_tokens = 0
        self._call_index = call_index
        self._first_unsaid = position
        self._last_read = position  # position after the last token that had any bytes
        self._decoder = IncrementalDecoder()
        # Python 3.11 takes long to look up an enum's members.
        self._is_text = kind is Kind.TEXT or kind is Kind.PREAMBLE
        self._is_preamble = kind is Kind.PREAMBLE
        self._is_reasoning = kind is Kind.REASONING
        self._is_dropped = kind is Kind.DROPPED

    def read(self, pieces: Sequence[bytes], position: int) -> Delta | None:
        """The delta for tokens with these bytes, the first of which is at `position`."""
        num_read = len(pieces)
        self.num_tokens += num_read
        while num_read and not pieces[num_read - 1]:
            num_read -= 1  # trailing tokens without bytes belong to the next delta, if any
        if not num_read:
            return None
        self._last_read = position + num_read
        return self._delta(self._decoder.push(b"".join(pieces)))

    def end(self) -> Delta | None:
        """The rest of an incomplete character."""
        return self._delta(self._decoder.flush())

    def _delta(self, text: str) -> Delta | None:
        if not text or self._is_dropped:
            return None
        self.has_spoken = True
        start, self._first_unsaid = self._first_unsaid, self._last_read
        if self._is_text:
            return TextDelta(text, start, self._last_read, self._is_preamble)
        if self._is_reasoning:
            return ReasoningDelta(text, start, self._last_read)
        return ToolCallArguments(self._call_index, text)
