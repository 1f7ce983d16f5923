"""The incremental Harmony parser: tokens in, deltas out; accepts any input, no I/O."""

import re
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from frontend.harmony.conversation import Kind
from frontend.harmony.header import CHANNELS, Header, HeaderKind, MessageKind, read_header
from frontend.text.tokenizer import SpecialToken, Vocabulary


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """The start of a message, which has text unless it is a call. `name` is the called tool's without
    `functions.`, `index` counts the calls from 0. The parser leaves `call_id` empty."""

    kind: MessageKind
    name: str = ""
    index: int = 0
    call_id: str = ""


class Text(msgspec.Struct, frozen=True, array_like=True):
    """More text of the open message or call, verbatim; `start` and `stop` are its tokens' positions."""

    text: str
    start: int
    stop: int


class End(msgspec.Struct, frozen=True, array_like=True):
    """The end of the open message; `complete` is False if the stream ended inside it."""

    complete: bool = True


Delta = Begin | Text | End


# A longer header lacks its `<|message|>`, and its text must not be held back any longer. The limit is higher
# before a channel is named, since the token that ends the message then determines its kind.
MAX_HEADER_BYTES = 1024
MAX_HEADER_BYTES_AFTER_CHANNEL = 256
_CHANNEL_BEGUN = re.compile(
    b"(?:%b)$" % b"|".join(name[:n].encode() for name in CHANNELS for n in range(1, len(name)))
)
_SPELLED = {token: token.value.encode() for token in SpecialToken}


class RawHeader:
    """`is_started`: it follows `<|start|>`; `expects_role`: a role must come next."""

    def __init__(self, offered: frozenset[str], *, is_started: bool, expects_role: bool) -> None:
        self.is_started = is_started
        self._expects_role = expects_role
        self._offered = offered
        self.raw = bytearray()
        self._pieces: list[tuple[int, int, bytes]] = []  # ordinary tokens: offset in `raw`, position, bytes

    def append(self, data: bytes, position: int) -> None:
        if data:
            self._pieces.append((len(self.raw), position, data))
            self.raw += data

    def rest(self, header: Header) -> "RawHeader":
        """Only the channel of `header`, which is this one parsed, and a channel's name begun at the end."""
        rest = RawHeader(self._offered, is_started=self.is_started, expects_role=False)
        if header.channel is not None:
            rest.raw += _SPELLED[SpecialToken.CHANNEL] + header.channel.encode()
        if (begun := _CHANNEL_BEGUN.search(self.raw)) is not None:
            rest.append(begun[0], self._pieces[-1][1] if self._pieces else 0)
        return rest

    def read(self, end: SpecialToken | None, then: bytes = b"") -> Header:
        return read_header(bytes(self.raw) + then, self._offered, end, expects_role=self._expects_role)

    def is_text(self) -> bool:
        """Whether the content is message text, so that a `<|channel|>` now starts another header."""
        if not self._pieces or self.raw == b"assistant":  # the latter is the usual case
            return False
        header = self.read(SpecialToken.CHANNEL, _SPELLED[SpecialToken.CHANNEL])
        return any(self.raw[start:].strip() for start, _ in header.texts)

    def text_tokens(self, header: Header) -> list[tuple[int, bytes]]:
        """(position, bytes) of the tokens of `header.texts`, without control tokens."""
        return [
            (position, data[max(start - offset, 0) : stop - offset])
            for start, stop in header.texts
            for offset, position, data in self._pieces
            if offset < stop and offset + len(data) > start
        ]


new_decoder = partial(getincrementaldecoder("utf-8"), "replace")
"""Holds back incomplete characters, replaces invalid bytes by U+FFFD."""


class ReadMessage(NamedTuple):
    """A message that has ended with its own token: its recipient as written, if any, and the positions of
    its first body token and after its last token."""

    kind: Kind
    call: str | None
    start: int
    stop: int


class OpenMessage:
    """`call` is the recipient as written, `start` the message's first position.

    Every token belongs to the delta that contains its last byte, so a delta's tokens start where those of the
    previous delta ended. `has_text` is set after any text; `num_tokens` includes tokens without text."""

    def __init__(self, kind: HeaderKind, call: str | None, start: int) -> None:
        self.kind = kind
        self.call = call
        self.start = start
        self.has_text = False
        self.num_tokens = 0
        self._first_unsent = start
        self._last_read = start  # position after the last token that had any bytes
        self._decode = new_decoder().decode

    def read(
        self, pieces: Sequence[bytes], position: int, deltas: list[Delta], *, is_last: bool = False
    ) -> None:
        """Adds the delta for tokens with these bytes, the first of which is at `position`; if they are the
        last, with the rest of an incomplete character."""
        num_read = len(pieces)
        self.num_tokens += num_read
        while num_read and not pieces[num_read - 1]:
            num_read -= 1  # trailing tokens without bytes belong to the next delta, if any
        if num_read:
            self._last_read = position + num_read
        text = self._decode(b"".join(pieces), is_last)
        if not text or self.kind == "dropped":
            return
        if not self.has_text and self.kind != "call":
            deltas.append(Begin(self.kind))
        self.has_text = True
        start, self._first_unsent = self._first_unsent, self._last_read
        deltas.append(Text(text, start, self._last_read))


_ENDS = (SpecialToken.END, SpecialToken.CALL, SpecialToken.RETURN, SpecialToken.ENDOFTEXT)
# In a body, these end a message that lacks its end token; all others are ignored there.
_INTERRUPTS = (SpecialToken.START, SpecialToken.CHANNEL)
# After these, another message follows.
_FOLLOWED = (SpecialToken.END, *_INTERRUPTS)


class HarmonyParser:
    """Parses one answer, which starts after the prompt's `<|start|>assistant`.

    Any sequence of token ids is accepted. The output has all of the assistant's text, in order, without
    control tokens and without text written as another author. Apart from how a message's text is split into
    deltas, it does not depend on how the tokens are split into `feed` calls. A message's deltas are followed
    by one End; a message without text has no deltas, unless it is a call.

    A recipient makes a message a tool call on any channel. Calls of built-in tools that were not offered
    (`browser.*`, `python`) become reasoning, as does every call without `may_call`. Text without a channel is
    visible, except without `<|message|>` and before another message; then it is reasoning. `repairs` counts
    repairs by kind; `messages` are those that have ended, whole if there are no repairs."""

    def __init__(
        self, vocabulary: Vocabulary, offered_tools: frozenset[str], *, may_call: bool = True
    ) -> None:
        self.repairs: Counter[str] = Counter()
        self.messages: list[ReadMessage] = []
        self._num_ended_reasoning_tokens = 0
        self._token_bytes = vocabulary.token_bytes
        self._controls = {token_id: token for token, token_id in vocabulary.special_ids.items()}
        self._may_call = may_call
        self._deltas: list[Delta] = []  # completed by the tokens being read
        self._position = 0  # of the next token in the answer
        self._num_calls = 0
        self._message: OpenMessage | None = None  # None: in a header
        self._max_name_bytes = max((len(name.encode()) for name in offered_tools), default=0)
        self._new_header = partial(RawHeader, offered_tools)
        self._header = self._new_header(is_started=True, expects_role=False)

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """The deltas that these tokens complete."""
        deltas = self._deltas = []
        pieces: list[bytes] = []  # of the open message
        size = len(self._token_bytes)
        for token_id in token_ids:
            control = self._controls.get(token_id)
            data = self._token_bytes[token_id] if 0 <= token_id < size else b""
            if control is None and self._message is not None:
                pieces.append(data)
                continue
            if self._message is not None:
                self._message.read(pieces, self._position, deltas)
                self._position += len(pieces)
                pieces = []
            if control is None:
                self._header.append(data, self._position)
                self._limit_header()
            else:
                self._obey(control)
            self._position += 1
        if self._message is not None:
            self._message.read(pieces, self._position, deltas)
            self._position += len(pieces)
        return deltas

    def finish(self) -> list[Delta]:
        self._deltas = []
        if self._message is not None:
            self._end_message(self._message, is_complete=False)
        else:
            self._end_header(None)
        return self._deltas

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens so far, without headers and control tokens."""
        num_tokens = self._num_ended_reasoning_tokens
        if self._message is not None and self._message.kind == "thought":
            num_tokens += self._message.num_tokens
        return num_tokens

    def _obey(self, control: SpecialToken) -> None:
        message = self._message
        if message is not None and (control in _ENDS or control in _INTERRUPTS):
            self._end_message(message)
            if control in _ENDS:
                if message.kind != "dropped" and control is not SpecialToken.ENDOFTEXT:
                    kind = "text" if message.kind == "preamble" else message.kind
                    self.messages.append(ReadMessage(kind, message.call, message.start, self._position + 1))
                return
            self.repairs["missing_end"] += 1
        elif message is not None or control is SpecialToken.STARTOFTEXT:
            self.repairs["stray_control"] += 1
            return
        if control in _ENDS or control is SpecialToken.START:
            self._end_header(control)
            if control is SpecialToken.START:
                self._header = self._new_header(is_started=True, expects_role=True)
        elif control is SpecialToken.MESSAGE:
            header = self._header.read(control)
            self._count_repair(header, is_ended=True)
            if tokens := self._header.text_tokens(header):
                aside = Header(kind="dropped" if header.kind == "dropped" else "thought")
                self._end_message(self._open_message(aside, tokens))
            self._open_message(header, [])
        else:
            # Text before a channel is a message without its end token.
            if control is SpecialToken.CHANNEL and self._header.is_text():
                self._end_header(control)
            self._header.raw += _SPELLED[control]
            self._limit_header()

    def _limit_header(self) -> None:
        """Stops waiting for `<|message|>` in an overlong header: outputs its text and drops noise."""
        raw, most = self._header.raw, MAX_HEADER_BYTES
        if (at := raw.find(_SPELLED[SpecialToken.CHANNEL])) >= 0:
            most = at + len(_SPELLED[SpecialToken.CHANNEL]) + MAX_HEADER_BYTES_AFTER_CHANNEL
        if len(raw) <= most + self._max_name_bytes:
            return
        header = self._header.read(None)
        tokens = self._header.text_tokens(header)
        if tokens:
            self._count_repair(header, is_ended=False)
            self._open_message(header, tokens)
        else:
            self.repairs["malformed_header"] += 1
            self._header = self._header.rest(header)

    def _end_header(self, control: SpecialToken | None) -> None:
        """Ends a header without `<|message|>` at a control token or the end of the stream: its text becomes
        the message's. A recipient without text is a call, unless another header follows."""
        if self._header.raw.strip():
            is_cut, is_followed = control is None, control in _FOLLOWED
            header = self._header.read(control)
            tokens = self._header.text_tokens(header)
            if tokens or not (is_cut or header.kind == "dropped"):
                self._count_repair(header, is_ended=False)
            if tokens or not (is_cut or is_followed):
                message = self._open_message(header, tokens, "thought" if is_followed else "text")
                self._end_message(message, is_complete=not is_cut)
        self._header = self._new_header(is_started=False, expects_role=False)

    def _count_repair(self, header: Header, *, is_ended: bool) -> None:
        if header.kind == "dropped":
            self.repairs["foreign_author"] += 1
        elif not is_ended:
            self.repairs["missing_message"] += 1
        elif not (header.is_well_formed and self._header.is_started):
            self.repairs["malformed_header"] += 1

    def _open_message(
        self, header: Header, tokens: Sequence[tuple[int, bytes]], otherwise: HeaderKind = "text"
    ) -> OpenMessage:
        """Starts a message with the text of its header; `otherwise` is its kind without a channel."""
        kind = header.kind or otherwise
        if kind == "call" and not self._may_call:
            kind = "thought"
            self.repairs["forbidden_call"] += 1
        position = tokens[0][0] if tokens else self._position + 1
        message = self._message = OpenMessage(kind, header.recipient, position)
        if header.call is not None and kind == "call":
            self._deltas.append(Begin("call", header.call, self._num_calls))
            self._num_calls += 1
        if tokens:
            message.read([data for _, data in tokens], tokens[-1][0] + 1 - len(tokens), self._deltas)
        return message

    def _end_message(self, message: OpenMessage, *, is_complete: bool = True) -> None:
        message.read((), self._position, self._deltas, is_last=True)
        if message.kind == "thought":
            self._num_ended_reasoning_tokens += message.num_tokens
        if message.has_text or message.kind == "call":
            self._deltas.append(End(is_complete))
        self._message = None
        self._header = self._new_header(is_started=False, expects_role=False)
