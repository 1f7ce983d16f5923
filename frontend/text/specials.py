"""The control tokens of Harmony, and the segments a rendered prompt is made of."""

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


Segment: TypeAlias = "str | SpecialToken | array[int]"
"""Text that is always ordinary, whatever it says, one control token, or tokens as the model wrote them."""
