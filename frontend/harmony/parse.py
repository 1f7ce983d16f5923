"""The incremental Harmony parser: tokens in, deltas out; accepts any input, no I/O."""

import enum
import re
from collections import Counter
from collections.abc import Sequence

from frontend.harmony.conversation import (
    Delta,
    MessageEnd,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from frontend.harmony.header import CHANNELS, Header, read_header, read_unended_header
from frontend.text.detokenize import IncrementalDecoder
from frontend.text.specials import SpecialToken, Vocabulary

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


class Kind(enum.Enum):
    """How a message appears to the client."""

    REASONING = enum.auto()
    TEXT = enum.auto()
    PREAMBLE = enum.auto()
    CALL = enum.auto()
    DROPPED = enum.auto()  # written as another author


class OpenMessage:
    """`call_index` is the call's index in the answer, `position` that of the message's first token.

    Every token belongs to the delta that contains its last byte, so a delta's tokens start where those of the
    previous delta ended. `has_spoken` is set after any text; `num_tokens` includes tokens without text.
    """

    def __init__(self, kind: Kind, call_index: int, position: int) -> None:
        self.kind = kind
        self.has_spoken = False
        self.num_tokens = 0
        self._call_index = call_index
        self._first_unsaid = position
        self._last_read = position  # position after the last token that had any bytes
        self._decoder = IncrementalDecoder()
        # Python 3.11 takes long to look up an enum's members.
        self._is_text = kind is Kind.TEXT or kind is Kind.PREAMBLE
        self._is_preamble = kind is Kind.PREAMBLE
        self._is_reasoning = kind is Kind.REASONING
        self._is_dropped = kind is Kind.DROPPED

    def read(self, pieces: Sequence[bytes], position: int) -> Delta | None:
        """The delta for tokens with these bytes, the first of which is at `position`."""
        num_read = len(pieces)
        self.num_tokens += num_read
        while num_read and not pieces[num_read - 1]:
            num_read -= 1  # trailing tokens without bytes belong to the next delta, if any
        if not num_read:
            return None
        self._last_read = position + num_read
        return self._delta(self._decoder.push(b"".join(pieces)))

    def end(self) -> Delta | None:
        """The rest of an incomplete character."""
        return self._delta(self._decoder.flush())

    def _delta(self, text: str) -> Delta | None:
        if not text or self._is_dropped:
            return None
        self.has_spoken = True
        start, self._first_unsaid = self._first_unsaid, self._last_read
        if self._is_text:
            return TextDelta(text, start, self._last_read, self._is_preamble)
        if self._is_reasoning:
            return ReasoningDelta(text, start, self._last_read)
        return ToolCallArguments(self._call_index, text)


class _Do(enum.Enum):
    """The action of a control token."""

    START_HEADER = enum.auto()  # ends a header without a message and starts a new one
    MARK = enum.auto()  # becomes part of the header
    OPEN = enum.auto()  # ends the header and starts the body
    END_HEADER = enum.auto()  # ends a message that has no body
    END_BODY = enum.auto()
    INTERRUPT = enum.auto()  # ends a body without `<|end|>`, then acts as in a header
    IGNORE = enum.auto()


_TABLE = {
    # token: (in a header, in a body)
    SpecialToken.START: (_Do.START_HEADER, _Do.INTERRUPT),
    SpecialToken.CHANNEL: (_Do.MARK, _Do.INTERRUPT),
    SpecialToken.CONSTRAIN: (_Do.MARK, _Do.IGNORE),
    SpecialToken.MESSAGE: (_Do.OPEN, _Do.IGNORE),
    SpecialToken.END: (_Do.END_HEADER, _Do.END_BODY),
    SpecialToken.CALL: (_Do.END_HEADER, _Do.END_BODY),
    SpecialToken.RETURN: (_Do.END_HEADER, _Do.END_BODY),
    SpecialToken.ENDOFTEXT: (_Do.END_HEADER, _Do.END_BODY),
    SpecialToken.STARTOFTEXT: (_Do.IGNORE, _Do.IGNORE),
}

_KIND_OF_CHANNEL = {"analysis": Kind.REASONING, "commentary": Kind.PREAMBLE, "final": Kind.TEXT}


class HarmonyParser:
    """Parses one answer, which starts after the prompt's `<|start|>assistant`.

    Any sequence of token ids is accepted. The output has all of the assistant's text, in order, without
    control tokens and without text written as another author. Apart from how a message's text is split into
    deltas, it does not depend on how the tokens are split into `feed` calls. A message's deltas are followed
    by one MessageEnd; a message without text has no deltas.

    A recipient makes a message a tool call on any channel. Calls of built-in tools that were not offered
    (`browser.*`, `python`) become reasoning, as does every call without `may_call`. Text without a channel is
    visible, except without `<|message|>` and before another message; then it is reasoning. `repairs` counts
    repairs by kind.
    """

    def __init__(
        self, vocabulary: Vocabulary, offered_tools: frozenset[str], *, may_call: bool = True
    ) -> None:
        self.repairs: Counter[str] = Counter()
        self._num_ended_reasoning_tokens = 0
        self._token_bytes = vocabulary.token_bytes
        self._num_token_bytes = len(vocabulary.token_bytes)
        self._controls = {token_id: token for token, token_id in vocabulary.special_ids.items()}
        self._control_ids = frozenset(self._controls)
        self._offered = offered_tools
        self._may_call = may_call
        self._position = 0  # of the next token in the answer
        self._num_calls = 0
        self._message: OpenMessage | None = None  # None: in a header
        self._max_name_bytes = max((len(name.encode()) for name in offered_tools), default=0)
        self._header = self._new_header(is_started=True)

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """The deltas that these tokens complete."""
        message = self._message
        if message is not None and self._control_ids.isdisjoint(token_ids):
            # The hot path.
            delta = message.read(self._bytes_of(token_ids), self._position)
            self._position += len(token_ids)
            return [] if delta is None else [delta]
        deltas: list[Delta] = []
        body_start = 0
        for i, token_id in enumerate(token_ids):
            control = self._controls.get(token_id)
            if self._message is not None:
                if control is None:
                    continue
                self._read_body(self._message, token_ids[body_start:i], deltas)
            if control is None:
                self._read_header(token_id, deltas)
            else:
                self._obey(control, deltas)
            self._position += 1
            body_start = i + 1
        if self._message is not None:
            self._read_body(self._message, token_ids[body_start:], deltas)
        return deltas

    def finish(self) -> list[Delta]:
        """The remaining deltas at the end of the stream."""
        deltas: list[Delta] = []
        if self._message is not None:
            self._end_message(self._message, deltas, is_complete=False)
        else:
            self._end_header(deltas, is_cut=True)
        return deltas

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens so far, without headers and control tokens."""
        num_tokens = self._num_ended_reasoning_tokens
        if self._message is not None and self._message.kind is Kind.REASONING:
            num_tokens += self._message.num_tokens
        return num_tokens

    def _obey(self, control: SpecialToken, deltas: list[Delta]) -> None:
        in_header, in_body = _TABLE[control]
        if self._message is None:
            self._obey_in_header(in_header, control, deltas)
        elif in_body is _Do.IGNORE:
            self.repairs["stray_control"] += 1
        else:
            self._end_message(self._message, deltas)
            if in_body is _Do.INTERRUPT:
                self.repairs["missing_end"] += 1
                self._obey_in_header(in_header, control, deltas)

    def _obey_in_header(self, action: _Do, control: SpecialToken, deltas: list[Delta]) -> None:
        match action:
            case _Do.START_HEADER:
                self._end_header(deltas, more_follows=True)
                self._header = self._new_header(is_started=True, expects_role=True)
            case _Do.MARK:
                # Text before a channel is a message without its end token.
                if control is SpecialToken.CHANNEL and self._header.is_text():
                    self._end_header(deltas, more_follows=True)
                self._header.append_marker(control)
                self._limit_header(deltas)
            case _Do.OPEN:
                self._open_body(deltas)
            case _Do.END_HEADER:
                self._end_header(
                    deltas,
                    more_follows=control is SpecialToken.END,
                    ends_call=control is SpecialToken.CALL,
                )
            case _:
                self.repairs["stray_control"] += 1

    def _new_header(self, *, is_started: bool = False, expects_role: bool = False) -> RawHeader:
        return RawHeader(
            self._offered, self._max_name_bytes, is_started=is_started, expects_role=expects_role
        )

    def _read_header(self, token_id: int, deltas: list[Delta]) -> None:
        self._header.append(self._bytes_of((token_id,))[0], self._position)
        self._limit_header(deltas)

    def _limit_header(self, deltas: list[Delta]) -> None:
        """Stops waiting for `<|message|>` in an overlong header: outputs its text and drops noise."""
        if not self._header.is_too_long:
            return
        header = self._header.read_unended(is_cut=True)
        tokens = self._header.text_tokens(header)
        if tokens:
            self._count_repairs(header)
            self._open_message(header, tokens, deltas)
        else:
            self.repairs["noise_in_header"] += 1
            self._header.forget(header)

    def _end_header(
        self,
        deltas: list[Delta],
        *,
        more_follows: bool = False,
        is_cut: bool = False,
        ends_call: bool = False,
    ) -> None:
        """Ends a header without `<|message|>`: its text becomes the message's. A recipient without text is a
        call, unless another header follows, which replaces this one."""
        if not self._header.is_blank:
            header = self._header.read_unended(is_cut=is_cut, ends_call=ends_call)
            tokens = self._header.text_tokens(header)
            has_call = header.call is not None and not is_cut
            if tokens or has_call or "noise_in_header" in header.repairs:
                self._count_repairs(header)
            if tokens or (has_call and not more_follows):
                otherwise = Kind.REASONING if more_follows else Kind.TEXT
                message = self._open_message(header, tokens, deltas, otherwise=otherwise)
                self._end_message(message, deltas, is_complete=not is_cut)
        self._header = self._new_header()

    def _open_body(self, deltas: list[Delta]) -> None:
        header = self._header.read()
        self._count_repairs(header)
        tokens = self._header.text_tokens(header)
        if tokens:
            self.repairs["text_in_header"] += 1
            aside = self._open_message(Header(is_hidden=True, is_foreign=header.is_foreign), tokens, deltas)
            self._end_message(aside, deltas)
        self._open_message(header, [], deltas)

    def _count_repairs(self, header: Header) -> None:
        self.repairs.update(header.repairs)
        if not self._header.is_started:
            self.repairs["missing_start"] += 1
        if self._header.expects_role and not header.has_role:
            self.repairs["missing_role"] += 1

    def _open_message(
        self,
        header: Header,
        tokens: Sequence[tuple[int, bytes]],
        deltas: list[Delta],
        *,
        otherwise: Kind = Kind.TEXT,
    ) -> OpenMessage:
        """Starts a message with the text of its header; `otherwise` is its kind without a channel."""
        kind = _kind_of(header, otherwise)
        if kind is Kind.CALL and not self._may_call:
            kind = Kind.REASONING
            self.repairs["forbidden_call"] += 1
        position = tokens[0][0] if tokens else self._position + 1
        message = self._message = OpenMessage(kind, self._num_calls, position)
        if header.call is not None and kind is Kind.CALL:
            deltas.append(ToolCallStart(self._num_calls, header.call))
            self._num_calls += 1
        if tokens:
            pieces = [data for _, data in tokens]
            _append(deltas, message.read(pieces, tokens[-1][0] + 1 - len(pieces)))
        return message

    def _read_body(self, message: OpenMessage, token_ids: Sequence[int], deltas: list[Delta]) -> None:
        _append(deltas, message.read(self._bytes_of(token_ids), self._position))
        self._position += len(token_ids)

    def _bytes_of(self, token_ids: Sequence[int]) -> list[bytes]:
        table = self._token_bytes
        size = self._num_token_bytes
        return [table[token_id] if 0 <= token_id < size else b"" for token_id in token_ids]

    def _end_message(self, message: OpenMessage, deltas: list[Delta], *, is_complete: bool = True) -> None:
        _append(deltas, message.end())
        if message.kind is Kind.REASONING:
            self._num_ended_reasoning_tokens += message.num_tokens
        if message.has_spoken or message.kind is Kind.CALL:
            deltas.append(MessageEnd(is_complete))
        self._message = None
        self._header = self._new_header()


def _append(deltas: list[Delta], delta: Delta | None) -> None:
    if delta is not None:
        deltas.append(delta)


def _kind_of(header: Header, otherwise: Kind) -> Kind:
    if header.is_foreign:
        return Kind.DROPPED
    if header.is_hidden:
        return Kind.REASONING
    if header.call is not None:
        return Kind.CALL
    return _KIND_OF_CHANNEL.get(header.channel or "", otherwise)
