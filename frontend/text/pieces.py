"""Finds where long text may be cut, so that it need not be tokenised as a whole."""

import re

PIECE_CHARS = 1 << 15

# No pre-token of o200k has anything but white space before a space or tab, anything beside digits, a line
# break before a letter, or a letter before punctuation other than an apostrophe. What is before such a place
# has the same pre-tokens without the rest: only those of white space depend on what follows.
_CUT = re.compile(
    r"(?<=\S)(?=[ \t])|(?<=[0-9])(?=[\x00-/:-\x7f])|(?<=[\n!-/:-~])(?=[0-9])|(?<=\n)(?=[A-Za-z])"
    r"|(?<=[A-Za-z])(?=[\x00-&(-/:-@\[-`{-\x7f])"
)


def cut(text: str, start: int, stop: int) -> int | None:
    """The first place between `start` and `stop` where the tokens of the text are those of its two parts, for
    gpt-oss's pre-tokenizer; None if there is none that is known to be one.
    """
    found = _CUT.search(text, start, stop)
    return None if found is None else found.start()
