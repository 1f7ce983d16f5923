"""The vocabulary as the parser needs it: control token ids, and the bytes of all other tokens."""

from collections.abc import Mapping, Sequence

import msgspec

from frontend.text.specials import SpecialToken


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """`token_bytes[id]` is the text of a token as UTF-8 bytes, which may be part of a character; b"" for
    control tokens and unused ids."""

    special_ids: Mapping[SpecialToken, int]
    token_bytes: Sequence[bytes]
