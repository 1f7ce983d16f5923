"""Tokens as text, without any format in it: for completions."""

from collections import Counter
from collections.abc import Sequence

from frontend.harmony.deltas import TextDelta
from frontend.text.detokenize import IncrementalDecoder
from frontend.text.tokenizer import ModelTokenizer


def text_of(token_ids: Sequence[int], tokenizer: ModelTokenizer) -> str:
    """The text of whole answers or prompts, with control tokens by their names."""
    reader = RawText(tokenizer, shows_special=True)
    return "".join(delta.text for delta in (*reader.feed(token_ids), *reader.finish()))


class RawText:
    """A `Reader` of `frontend.turn.choice`: all is visible text, control tokens if it `shows_special`."""

    num_calls = 0
    num_reasoning_tokens = 0

    def __init__(self, tokenizer: ModelTokenizer, *, shows_special: bool = False) -> None:
        self.repairs: Counter[str] = Counter()
        self._tokenizer = tokenizer
        shown = tokenizer.special_ids.items() if shows_special else ()
        self._special_bytes = {token_id: token.value.encode() for token, token_id in shown}
        self._decoder = IncrementalDecoder()
        self._num_read = 0
        self._num_said = 0

    def feed(self, token_ids: Sequence[int]) -> Sequence[TextDelta]:
        """The text that these tokens complete."""
        self._num_read += len(token_ids)
        of_special = self._special_bytes.get
        data = b"".join([of_special(i) or self._tokenizer.token_bytes(i) for i in token_ids])
        return self._said(self._decoder.push(data))

    def finish(self) -> Sequence[TextDelta]:
        """What is left of a character that was cut."""
        return self._said(self._decoder.flush())

    def _said(self, text: str) -> Sequence[TextDelta]:
        if not text:
            return ()
        start, self._num_said = self._num_said, self._num_read
        return (TextDelta(text, start, self._num_read),)
