"""Harmony's control tokens, and the segments of a rendered prompt."""

import enum


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


Segment = str | SpecialToken
"""Plain text, even if it spells a control token, or one control token."""
