"""Decodes raw completions: all tokens are plain text."""

from collections import Counter
from collections.abc import Iterable, Sequence

from frontend.harmony.conversation import TextDelta
from frontend.text.detokenize import IncrementalDecoder
from frontend.text.tokenizer import ModelTokenizer


def text_of(token_ids: Sequence[int], tokenizer: ModelTokenizer) -> str:
    """The text of a complete token sequence, with control tokens spelled out."""
    reader = RawText(tokenizer, shows_special=True)
    return "".join(delta.text for delta in (*reader.feed(token_ids), *reader.finish()))


def token_texts(token_ids: Iterable[int], tokenizer: ModelTokenizer) -> list[str]:
    """The `text_of` each token by itself."""
    special = {token_id: token.value for token, token_id in tokenizer.special_ids.items()}
    return [special.get(token_id) or tokenizer.decode((token_id,)) for token_id in token_ids]


class RawText:
    """A `Reader` of `frontend.turn.choice`: everything is visible text; `shows_special` includes control
    tokens."""

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
        """The rest of an incomplete character."""
        return self._said(self._decoder.flush())

    def _said(self, text: str) -> Sequence[TextDelta]:
        if not text:
            return ()
        start, self._num_said = self._num_said, self._num_read
        return (TextDelta(text, start, self._num_read),)
