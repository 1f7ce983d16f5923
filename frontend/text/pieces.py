"""Cuts long text where no token crosses the cut, so that it need not be tokenised as a whole."""

from collections.abc import Iterator

PIECE_CHARS = 1 << 16
_MOST_SPACES = 1000
"""Spaces looked at before going on `num_chars` later: few texts have so many that are not between letters."""


def pieces(text: str, num_chars: int = PIECE_CHARS) -> Iterator[str]:
    """The text in pieces of about `num_chars` characters, or longer if it has no place to cut.

    The cuts are before a space between two ASCII letters: there, every GPT pre-tokenizer ends one word and
    begins the next, so that the tokens of the pieces are the tokens of the text.
    """
    start = 0
    while (stop := _cut(text, start + num_chars, num_chars)) is not None:
        yield text[start:stop]
        start = stop
    yield text[start:]


def _cut(text: str, start: int, num_chars: int) -> int | None:
    """The first place to cut from `start` on."""
    num_seen = 0
    while (found := text.find(" ", start)) >= 0:
        if _is_letter(text[found - 1 : found]) and _is_letter(text[found + 1 : found + 2]):
            return found
        num_seen += 1
        start = found + (1 if num_seen % _MOST_SPACES else num_chars)
    return None


def _is_letter(character: str) -> bool:
    return character.isascii() and character.isalpha()
