"""The message that is being parsed: its tokens' bytes become deltas of one kind."""

import enum
from collections.abc import Sequence

from frontend.harmony.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments
from frontend.text.detokenize import IncrementalDecoder


class Kind(enum.Enum):
    """What a message is to the client."""

    REASONING = enum.auto()
    TEXT = enum.auto()
    PREAMBLE = enum.auto()
    CALL = enum.auto()
    DROPPED = enum.auto()  # said in another's name


class OpenMessage:
    """`call_index` counts the calls of an answer; `position` is that of the first token of the message.

    Every token belongs to one delta, the one that says its last byte, so a delta's tokens begin where those
    of the delta before it ended. `has_spoken` says whether there was any text, `num_tokens` how many tokens
    there were, those without text included.
    """

    def __init__(self, kind: Kind, call_index: int, position: int) -> None:
        self.kind = kind
        self.has_spoken = False
        self.num_tokens = 0
        self._call_index = call_index
        self._first_unsaid = position
        self._last_read = position  # position after the last token that had any bytes
        self._decoder = IncrementalDecoder()

    def read(self, pieces: Sequence[bytes], position: int) -> Delta | None:
        """The delta for tokens with these bytes, the first of which is at `position`."""
        num_read = len(pieces)
        self.num_tokens += num_read
        while num_read and not pieces[num_read - 1]:
            num_read -= 1  # tokens without bytes at the end wait for what follows, if anything does
        if not num_read:
            return None
        self._last_read = position + num_read
        return self._delta(self._decoder.push(b"".join(pieces)))

    def end(self) -> Delta | None:
        """What is left of a character that was cut."""
        return self._delta(self._decoder.flush())

    def _delta(self, text: str) -> Delta | None:
        if not text or self.kind is Kind.DROPPED:
            return None
        self.has_spoken = True
        start, self._first_unsaid = self._first_unsaid, self._last_read
        if self.kind is Kind.REASONING:
            return ReasoningDelta(text, start, self._last_read)
        if self.kind is Kind.CALL:
            return ToolCallArguments(self._call_index, text)
        return TextDelta(text, start, self._last_read, self.kind is Kind.PREAMBLE)
