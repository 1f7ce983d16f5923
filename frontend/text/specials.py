"""Harmony's control tokens, and the segments of a rendered prompt."""

import enum
from array import array
from typing import TypeAlias


class SpecialToken(enum.Enum):
    """A control token; the value is its literal text in `tokenizer.json`."""

    STARTOFTEXT = "<|startoftext|>"
    ENDOFTEXT = "<|endoftext|>"
    START = "<|start|>"
    CHANNEL = "<|channel|>"
    CONSTRAIN = "<|constrain|>"
    MESSAGE = "<|message|>"
    END = "<|end|>"
    CALL = "<|call|>"
    RETURN = "<|return|>"

    __hash__ = object.__hash__  # Enum's own is written in Python


Segment: TypeAlias = "str | SpecialToken | array[int]"
"""Plain text, even if it spells a control token; one control token; or tokens as the model wrote them."""
