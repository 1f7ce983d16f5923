"""Token bytes to text as they arrive, and the stop strings in it."""

from codecs import utf_8_decode
from collections.abc import Iterable


class IncrementalDecoder:
    """UTF-8 that comes in pieces: holds back a character until it is whole, puts U+FFFD for what is none."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, data: bytes) -> str:
        """The text that `data` completes; empty while a character is unfinished."""
        if self._held:
            data = self._held + data
        text, num_used = utf_8_decode(data, "replace", False)
        self._held = data[num_used:]
        return text

    def flush(self) -> str:
        """What is still held back, as it is; nothing more comes."""
        held, self._held = self._held, b""
        return held.decode(errors="replace")


class StopStrings:
    """Cuts text at the first of some stop strings, which may arrive in pieces.

    Text that may be the beginning of a stop string is held back until it is clear; at most the longest stop
    string's length less one. The one that is complete first counts, so that the result does not depend on how
    the text came. The stop string itself is not part of the text. Empty stop strings are ignored.
    `met` is the one that was met.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.met: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to send, whether a stop string was met); after one, nothing comes any more."""
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
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """(where it begins, the stop string) of the one that is complete first."""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1:] if found else None

    def _num_doubtful(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        num_doubtful = 0
        for stop in self._stops:
            if text[-1:] not in stop[:-1]:
                continue  # by far the most frequent case
            for num in range(min(len(stop) - 1, len(text)), num_doubtful, -1):
                if text.endswith(stop[:num]):
                    num_doubtful = num
                    break
        return num_doubtful
