"""Harmony's control tokens, and the segments of a rendered prompt."""

import enum
from array import array
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec


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


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """`token_bytes[id]` is the text of a token as UTF-8 bytes, which may be part of a character; b"" for
    control tokens and unused ids."""

    special_ids: Mapping[SpecialToken, int]
    token_bytes: Sequence[bytes]
