"""The tokens of the text that a garbled header holds, where tokens cross the ends of the text."""

import pytest

from frontend.harmony.parse import RawHeader
from frontend.text.tokenizer import SpecialToken

CHANNEL = SpecialToken.CHANNEL


@pytest.mark.parametrize(
    ("parts", "texts"),
    [
        ([b"Hello there to=functions.f ", CHANNEL, b"commentary"], [(0, b"Hello there")]),
        ([b"Hi", b" all", b" to", b"=functions.f", CHANNEL, b"commentary"], [(0, b"Hi"), (1, b" all")]),
        ([CHANNEL, b"analysis Hello to=functions.f code"], [(1, b"Hello")]),
        ([CHANNEL, b"analysis", b" ", b"\nHello", b" you"], [(3, b"Hello"), (4, b" you")]),
        ([CHANNEL, b"fin", b"alHello", b" you"], [(2, b"Hello"), (3, b" you")]),
        ([b" \nHi. ", CHANNEL, b"final", b" Hello"], [(0, b"Hi."), (3, b" Hello")]),
        ([b"assistant", CHANNEL, b"final"], []),
    ],
)
def test_each_token_has_only_its_part_of_the_text(
    parts: list[bytes | SpecialToken], texts: list[tuple[int, bytes]]
) -> None:
    raw = RawHeader(frozenset({"f"}), 10, is_started=False, expects_role=False)
    for position, part in enumerate(parts):
        if isinstance(part, SpecialToken):
            raw.append_marker(part)
        else:
            raw.append(part, position)
    assert raw.text_tokens(raw.read()) == texts
