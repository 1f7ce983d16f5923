"""Interprets message headers: role, channel, recipient and content type, in any order.

In about one of 25 turns, gpt-oss writes a malformed one, in known ways; each has a rule here."""

import itertools
import re
import string
import unicodedata
from functools import lru_cache
from typing import Literal

import msgspec

from frontend.harmony.conversation import is_builtin
from frontend.text.tokenizer import SpecialToken

ROLES = ("assistant", "user", "system", "developer", "tool")
MessageKind = Literal["thought", "text", "preamble", "call"]
"""A preamble is text for the user before a call: commentary without a recipient."""
HeaderKind = MessageKind | Literal["dropped"]
_KINDS: dict[str, HeaderKind] = {"analysis": "thought", "commentary": "preamble", "final": "text"}
CHANNELS = tuple(_KINDS)
CONTENT_TYPES = ("json", "code", "text", "none")
# These start a new part anywhere.
MARKERS = ("channel", "constrain", "to")

# One alternative per kind of part. Control tokens count even where the model spelled them as plain text,
# which it learns from histories with control text attached to names.
_PARTS = re.compile(
    rb"""
      (?P<space> \s+ )
    | <\|channel\|>   \s* (?P<channel> analysis | commentary | final | (?!to[\s:=]) [^\s<]+ | )
    | <\|constrain\|> \s* (?P<constrain> (?:json|code|text|none)(?![\w.]) | (?!to[\s:=]) [^\s<{\[]+ | )
    | (?: to= \s* | \b to \s* [=:]? \s* (?=functions\.) ) (?P<quote> ["']? ) (?P<to> [^\s<{\["']* )
      (?: (?P=quote) | $ )
    | (?P<role> assistant | user | system | developer | tool )
      (?= \s | <\| | to= | analysis | commentary | final | $ )
    | (?<= assistant ) (?P<glued> analysis | commentary | final )
    | (?P<bare> analysis | commentary | final ) (?= \s | <\| | to= | $ )
    | (?P<type> json | code | text | none ) (?= [\s<{\["] | $ )
    | (?P<control> <\|\w*(?:\|>)? )
    | (?P<word> (?: (?! <\| | to= ) [^\s{] )+ | \{ )
    """,
    re.VERBOSE,
)
# Headers as they should be; all others are repaired.
_WELL_FORMED = re.compile(
    rb"""
      \s* (?P<role> assistant )? \s* (?: to=(?:python|[^\s<.]+\.[^\s<]+) \s* )?
      <\|channel\|> \s* (?: analysis | commentary | final ) \s* (?: to=(?:python|[^\s<.]+\.[^\s<]+) \s* )?
      (?: <\|constrain\|> \s* )? (?: json | code | text | none )? \s*
    """,
    re.VERBOSE,
)
# After `<|start|>` it is the role, even with text attached, unless a channel follows that text.
_STARTED_ROLE = re.compile(rb"\s*(assistant)(?![^\s<]*<\|channel)")
_CHANNEL_WORD = re.compile("|".join((*CHANNELS, "assistant")))
_OTHER_WORD = re.compile("|".join((*ROLES, *CONTENT_TYPES)))
_NUMBER = re.compile(r"\d+")
# Punctuation that is never a text by itself; quotes and brackets may be a whole JSON answer.
_STRAY_KINDS = frozenset({"Pd", "Pc", "Po"})
_STRAY_SIGNS = frozenset("|>")
_NO_STRAY_SIGNS = frozenset("\"'")
# The kinds of parts that name a channel.
_CHANNEL_KINDS = frozenset({"channel", "bare", "glued"})
_MIN_CHANNEL_CHARS = 4  # enough to recognise a channel by the start of its name
_NAMELESS = frozenset({"", "functions", "functions."})
_UNCALLABLE = _NAMELESS | {"all", *ROLES, *CHANNELS, *CONTENT_TYPES}
_PUNCTUATION = string.punctuation + "–—…"
# Header words attached to a tool's name, where the model omitted the space.
_GLUE = re.compile(r"\W*(?:commentary|analysis|final|json|code|text|assistant|channel|constrain|message|to=)")


class Part(msgspec.Struct):
    """`kind` is the matching group of `_PARTS`, `tool` for a bare tool name, or `noise`."""

    kind: str
    value: str
    start: int
    value_start: int
    stop: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed header. `kind` is how its message appears to the client (None: it has no channel), `dropped`
    if the model writes as the user, the system or a tool. `call` is the tool's name without `functions.`;
    calls of built-in tools that were not offered are thoughts. `texts` are the byte ranges of the raw header
    that are text."""

    kind: HeaderKind | None = None
    channel: str | None = None
    call: str | None = None
    recipient: str | None = None
    is_well_formed: bool = False
    texts: tuple[tuple[int, int], ...] = ()


_CACHED_HEADERS = 512  # most answers have the same few


@lru_cache(maxsize=_CACHED_HEADERS)
def read_header(
    raw: bytes, offered: frozenset[str], end: SpecialToken | None, *, expects_role: bool
) -> Header:
    """Parses a header that ended with the token `end` (None: the stream ended, or it is too long); control
    tokens are spelled out in `raw`. `expects_role`: it follows `<|start|>`."""
    reading = _Reading(raw, offered, expects_role=expects_role)
    return reading.ended() if end is SpecialToken.MESSAGE else reading.unended(end)


class _Reading:
    """A header's parts in order, without whitespace."""

    def __init__(self, raw: bytes, offered: frozenset[str], *, expects_role: bool) -> None:
        self.parts: list[Part] = []
        self._raw = raw
        self._offered = offered
        self._expects_role = expects_role
        role = _STARTED_ROLE.match(raw) if expects_role else None
        if role is not None:
            self.parts.append(Part("role", "assistant", role.start(), role.start(1), role.end()))
        for match in _PARTS.finditer(raw, role.end() if role is not None else 0):
            kind = match.lastgroup or "word"
            value = match[kind].decode(errors="replace")
            if kind != "space":
                part = Part(kind, value, match.start(), match.start(kind), match.end())
                self.parts.append(self._named(part) if kind == "word" else part)

    def ended(self) -> Header:
        """With `<|message|>`. Of the unknown words, the first may be a role if one is expected, and a single
        last one may be a content type; noise is dropped, and all others are text."""
        parts = self.parts
        words = [i for i, part in enumerate(parts) if part.kind == "word"]
        if self._expects_role and words[:1] == [0] and self._kind_after(0) in ("channel", "to", None):
            del words[0]
        if len(parts) > 1 and words == [len(parts) - 1]:
            del words[0]
        # From the second one on with the space before it.
        texts = ((parts[i - 1].stop if i > words[0] else parts[i].start, parts[i].stop) for i in words)
        return self._header(parts, tuple(texts))

    def unended(self, end: SpecialToken | None) -> Header:
        """Without `<|message|>`: the text starts at the first word that is not part of a header. Noise up to
        the next marker or the end is no text, nor is the start of a header's word where the stream ends."""
        parts, is_cut, kept = self.parts, end is None, list[Part]()
        start, i = len(self._raw), 0
        while i < len(parts):
            part, is_header = parts[i], self._is_header(i)
            if is_cut and not is_header and i == len(parts) - 1 and _is_unfinished(part):
                break
            if is_header or part.kind == "channel":
                kept.append(part)
            num_noise = 0 if is_header else self._num_noise(i, kept, is_cut=is_cut)
            if not is_header and not num_noise:
                start = self._text_start(i, kept)
                break
            i += num_noise or 1
        return self._header(kept, ((start, len(self._raw)),), ends_call=end is SpecialToken.CALL)

    def _named(self, word: Part) -> Part:
        """A word outside the header grammar, with its kind after the parts before it."""
        is_author = self._expects_role and not self.parts
        looks_like_tool = is_builtin(word.value) or all(word.value.partition("."))
        if self._names_tool(word.value) or (is_author and looks_like_tool):
            word.kind = "tool"
        elif is_author and word.value.lower() in ROLES:
            word.kind, word.value = "role", word.value.lower()
        elif self.parts and _is_noise(word.value, _channel_of(self.parts)):
            word.kind = "noise"
        return word

    def _names_tool(self, word: str) -> bool:
        """Whether a word without `to=` names a tool."""
        return word in self._offered or (word.startswith("functions.") and word != "functions.")

    def _kind_after(self, i: int) -> str | None:
        return self.parts[i + 1].kind if i + 1 < len(self.parts) else None

    def _is_header(self, i: int) -> bool:
        """Whether part `i` can belong to a header without `<|message|>`."""
        part, following = self.parts[i], self._kind_after(i)
        is_known = following in MARKERS
        match part.kind:
            case "channel":
                is_known |= part.value.lower() in ("", *CHANNELS) or part.value.startswith("functions.")
                is_begun = len(part.value) >= _MIN_CHANNEL_CHARS and _meant_channel(part.value) is not None
                is_known |= following is None and is_begun
            case "constrain":
                is_known |= part.value in ("", *CONTENT_TYPES) or part.value.startswith("functions.")
            case "to" | "glued":
                is_known = True
            case "role":
                is_known = i == 0 and (is_known or self._expects_role or part.value == "assistant")
            case "type":
                is_known = following == "to" or _has_recipient(self.parts[:i])
            case "tool":
                is_known |= part.value.startswith("functions.")
                is_known |= self._raw[part.stop :].lstrip()[:1] == b"{"
            case "control":
                is_known = i > 0 or part.value == "<|message|>"
            case "word" | "noise":
                is_name = i == 0 or (i == 1 and self.parts[0].value == "tool")
                is_known = self._expects_role and is_name and following in ("channel", "to")
        return is_known

    def _num_noise(self, i: int, kept: list[Part], *, is_cut: bool) -> int:
        """The number of noise parts from `i` on: all up to the next marker, or one that contains a channel's
        name, which no sentence starts with."""
        parts = self.parts
        stop = next(
            (j for j in range(i + 1, len(parts)) if parts[j].kind in (*MARKERS, "control")), len(parts)
        )
        if is_cut and stop == len(parts) > i + 1 and _is_unfinished(parts[-1]):
            stop -= 1
        text = self._raw[parts[i].value_start : parts[stop - 1].stop].decode(errors="replace")
        if kept and _is_noise(text, _channel_of(kept)):
            return stop - i
        return int(parts[i].kind == "noise" and _CHANNEL_WORD.search(parts[i].value) is not None)

    def _text_start(self, i: int, kept: list[Part]) -> int:
        """Where the text starts that part `i` belongs to; words before JSON arguments are skipped."""
        for part in self.parts[i:] if _has_recipient(kept) else ():
            if self._raw[part.start : part.start + 1] in (b"{", b"[", b'"'):
                return part.start
            if part.kind not in ("noise", "bare", "type", "channel", "constrain", "control"):
                break
        return self.parts[i].value_start

    def _header(
        self, parts: list[Part], texts: tuple[tuple[int, int], ...], *, ends_call: bool = False
    ) -> Header:
        """The header that these parts make, whose other ranges are `texts`."""
        channel = _channel_of(parts) or next(
            (_meant_channel(part.value) for part in reversed(parts) if part.kind in _CHANNEL_KINDS), None
        )
        explicit = [part.value for part in parts if part.kind == "to"]
        named = [value for value in explicit if value in self._offered or not _is_uncallable(value)]
        if not named and channel != "final" and self._is_foreign(parts, ends_call=ends_call):
            return Header(kind="dropped", texts=texts)
        recipient = named[0] if named else self._unmarked_recipient(parts, explicit)
        call = None if recipient is None else self._call_name(recipient)
        found = _WELL_FORMED.fullmatch(self._raw)
        has_role = found is not None and (not self._expects_role or found["role"] is not None)
        kind = _KINDS.get(channel or "")
        if recipient is not None:
            kind = "call" if call is not None else "thought"
        return Header(
            kind=kind,
            channel=channel,
            call=call,
            recipient=recipient,
            is_well_formed=has_role and (call in (None, recipient) or recipient == f"functions.{call}"),
            texts=texts,
        )

    def _is_foreign(self, parts: list[Part], *, ends_call: bool) -> bool:
        """Whether the model writes as the user, the system or a tool. A leading name is the author, unless
        the message ends as a call; a tool's result has no content type, and is mostly `to=assistant`."""
        is_author = self._expects_role and not ends_call
        is_result = any(part.kind == "to" and part.value.startswith(ROLES) for part in parts)
        match parts[:1]:
            case [Part(kind="role", value=role)]:
                return role != "assistant"
            case [Part(kind="tool")]:
                has_type = any(part.kind in ("type", "constrain") for part in parts)
                return is_result or (is_author and not has_type)
            case [Part(kind="word", value=word)]:
                return is_author and is_result and not word.startswith("assistant")
        return False

    def _unmarked_recipient(self, parts: list[Part], explicit: list[str]) -> str | None:
        """The recipient that no `to=` names, as written."""
        if any(value.startswith(ROLES) for value in explicit):
            return None
        for part in parts:
            is_marked = part.kind in ("channel", "constrain") and part.value not in _UNCALLABLE
            if part.kind == "tool" or (is_marked and self._names_tool(part.value)):
                return part.value
        return None

    def _call_name(self, recipient: str) -> str | None:
        """The tool that the recipient refers to, or None for a built-in tool that was not offered.

        An unknown name is returned unchanged, unless the longest offered name in it has only header words,
        namespaces or punctuation around it."""
        if is_builtin(recipient):
            return recipient if {recipient, recipient.partition(".")[0]} & self._offered else None
        name = recipient.removeprefix("functions.")
        bare = name.strip(_PUNCTUATION)
        meant = [
            tool
            for tool in self._offered
            if tool == bare
            or (name.startswith(tool) and _GLUE.match(name, len(tool)))
            or bare.endswith((f".{tool}", f"/{tool}", f":{tool}"))
        ]
        return name if name in self._offered else max(meant, key=lambda tool: (len(tool), tool), default=name)


def _channel_of(parts: list[Part]) -> str | None:
    """The last valid channel so far."""
    named = (part.value for part in reversed(parts) if part.kind in _CHANNEL_KINDS)
    return next((value for value in named if value in CHANNELS), None)


def _meant_channel(word: str) -> str | None:
    return next((name for name in CHANNELS if word and name.startswith(word.lower())), None)


def _has_recipient(parts: list[Part]) -> bool:
    return any(part.kind in ("to", "tool") for part in parts)


def _is_uncallable(recipient: str) -> bool:
    """Whether a recipient cannot be a tool: it is a header word or punctuation."""
    return recipient.strip(_PUNCTUATION) in _UNCALLABLE or _is_noise(recipient, "analysis")


def _is_noise(text: str, channel: str | None) -> bool:
    """Whether text in a header consists only of header words and stray punctuation: `?commentary?`, `––`.

    A role or content type alone may be an answer, except on analysis and commentary; on commentary, where
    the model writes sentences, numbers are noise, too: `2?`."""
    rest = _CHANNEL_WORD.sub("", text)
    if channel in ("analysis", "commentary") or len(rest) < len(text):
        rest = _OTHER_WORD.sub("", rest)
    if channel == "commentary":
        rest = _NUMBER.sub("", rest)
    return all(_is_stray(sign) for sign in rest)


def _is_unfinished(part: Part) -> bool:
    """Whether the part could have become header words if the stream had not ended in it."""
    value = part.value.lower()
    if part.kind == "channel":
        return any(name.startswith(value) for name in CHANNELS)
    rest = "".join(itertools.dropwhile(_is_stray, _CHANNEL_WORD.sub("", value)))
    words = (*CHANNELS, *CONTENT_TYPES, *ROLES, "to=", "functions.", "<|")
    return part.kind == "constrain" or any(word.startswith(rest) for word in words)


def _is_stray(sign: str) -> bool:
    is_punctuation = unicodedata.category(sign) in _STRAY_KINDS and sign not in _NO_STRAY_SIGNS
    return is_punctuation or sign.isspace() or sign in _STRAY_SIGNS
