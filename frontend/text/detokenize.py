"""Incremental detokenization, and stop strings."""

from codecs import utf_8_decode
from collections.abc import Iterable


class IncrementalDecoder:
    """Decodes UTF-8 incrementally: holds back incomplete characters, replaces invalid bytes by U+FFFD."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, data: bytes, *, is_last: bool = False) -> str:
        """The text that `data` completes; empty while a character is incomplete, unless it is the last."""
        data = self._held + data
        text, num_used = utf_8_decode(data, "replace", is_last)
        self._held = data[num_used:]
        return text


class StopStrings:
    """Cuts text before the first stop string, which may arrive in pieces.

    Text that may be the start of a stop string is held back: at most one character less than the longest
    stop string. The stop string that is complete first wins, so that the result does not depend on how the
    text was split. Empty stop strings are ignored. `met` is the stop string that ended the text.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.met: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to send, whether a stop string was met). Later text is dropped."""
        if self.met is not None:
            return "", True
        text = self._held + text
        found = self._first_stop(text)
        if found is not None:
            self._held = ""
            at, self.met = found
            return text[:at], True
        num_safe = len(text) - self._num_doubtful(text)
        self._held = text[num_safe:]
        return text[:num_safe], False

    def flush(self) -> str:
        """The held-back text at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """(position, stop string) of the one that is complete first."""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1:] if found else None

    def _num_doubtful(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        num_doubtful = 0
        for stop in self._stops:
            if text[-1:] not in stop[:-1]:
                continue  # the hot path
            for num in range(min(len(stop) - 1, len(text)), num_doubtful, -1):
                if text.endswith(stop[:num]):
                    num_doubtful = num
                    break
        return num_doubtful
