"""Buffers an incoming header: its bytes, and the token that each of them came from."""

import re

from frontend.harmony.header import CHANNELS, Header, read_header, read_unended_header
from frontend.text.specials import SpecialToken

# A longer header lacks its `<|message|>`, and its text must not be held back any longer. The limit is higher
# before a channel is named, since the token that ends the message then determines its kind.
MAX_HEADER_BYTES = 1024
MAX_HEADER_BYTES_AFTER_CHANNEL = 256
_CHANNEL_BEGUN = re.compile(
    b"(?:%b)$" % b"|".join(name[:n].encode() for name in CHANNELS for n in range(1, len(name)))
)
_SPELLED = {token: token.value.encode() for token in SpecialToken}


class RawHeader:
    """`max_name_bytes` is the length of the longest tool name and extends the size limits.

    `is_started` means that the header follows `<|start|>`, `expects_role` that a role must come next.
    """

    def __init__(
        self, offered: frozenset[str], max_name_bytes: int, *, is_started: bool, expects_role: bool
    ) -> None:
        self.is_started = is_started
        self.expects_role = expects_role
        self._offered = offered
        self._max_name_bytes = max_name_bytes
        self._clear()

    def _clear(self) -> None:
        self._raw = bytearray()
        self._pieces: list[tuple[int, int, bytes]] = []  # ordinary tokens: offset in `_raw`, position, bytes
        self._has_channel = False
        self._max_bytes = MAX_HEADER_BYTES + self._max_name_bytes

    @property
    def is_blank(self) -> bool:
        """Whether it contains only whitespace."""
        return not self._raw.strip()

    @property
    def is_too_long(self) -> bool:
        """Whether this can no longer be a header."""
        return len(self._raw) > self._max_bytes

    def append(self, data: bytes, position: int) -> None:
        """Add an ordinary token's bytes."""
        if data:
            self._pieces.append((len(self._raw), position, data))
            self._raw += data

    def append_marker(self, token: SpecialToken) -> None:
        """Add `<|channel|>` or `<|constrain|>`."""
        self._raw += _SPELLED[token]
        if not self._has_channel and token is SpecialToken.CHANNEL:
            self._has_channel = True
            self._max_bytes = len(self._raw) + MAX_HEADER_BYTES_AFTER_CHANNEL + self._max_name_bytes

    def forget(self, header: Header) -> None:
        """Drop everything except the channel of `header`, which is this header parsed, and the start of a
        channel's name at the end."""
        begun = _CHANNEL_BEGUN.search(self._raw)
        position = self._pieces[-1][1] if self._pieces else 0
        self.expects_role = False
        self._clear()
        if header.channel is not None:
            self.append_marker(SpecialToken.CHANNEL)
            self._raw += header.channel.encode()
        if begun is not None:
            self.append(begun[0], position)

    def read(self) -> Header:
        """The header, after `<|message|>`."""
        return read_header(bytes(self._raw), self._offered, expects_role=self.expects_role)

    def read_unended(self, *, is_cut: bool = False, ends_call: bool = False) -> Header:
        """The header, without `<|message|>`."""
        return read_unended_header(
            bytes(self._raw),
            self._offered,
            expects_role=self.expects_role,
            is_cut=is_cut,
            ends_call=ends_call,
        )

    def is_text(self) -> bool:
        """Whether the content is message text, so that a `<|channel|>` now starts another header."""
        if not self._pieces or self._raw == b"assistant":  # the latter is the usual case
            return False
        with_channel = bytes(self._raw) + _SPELLED[SpecialToken.CHANNEL]
        header = read_unended_header(with_channel, self._offered, expects_role=self.expects_role)
        return any(self._raw[start:].strip() for start, _ in header.texts)

    def text_tokens(self, header: Header) -> list[tuple[int, bytes]]:
        """(position, bytes) of the tokens of `header.texts`, without control tokens or leading whitespace."""
        tokens: list[tuple[int, bytes]] = []
        for start, stop in header.texts:
            if not tokens:
                text = self._raw[start:stop]
                start += len(text) - len(text.lstrip())  # noqa: PLW2901  the part without blanks
            tokens += [
                (position, data[max(start - offset, 0) : stop - offset])
                for offset, position, data in self._pieces
                if offset < stop and offset + len(data) > start
            ]
        return tokens
