"""Splits a raw header into parts and classifies each word, regardless of its position."""

import itertools
import re
import unicodedata

import msgspec

from frontend.harmony.conversation import is_builtin

ROLES = ("assistant", "user", "system", "developer", "tool")
CHANNELS = ("analysis", "commentary", "final")
CONTENT_TYPES = ("json", "code", "text", "none")
# These start a new part anywhere.
MARKERS = ("channel", "constrain", "to")

# One alternative per kind of part. Control tokens count even where the model spelled them as plain text,
# which it learns from histories with control text attached to names.
_PARTS = re.compile(
    rb"""
      (?P<space> \s+ )
    | <\|channel\|>   \s* (?P<channel> analysis | commentary | final | (?!to=) [^\s<]+ | )
    | <\|constrain\|> \s* (?P<constrain> (?:json|code|text|none)(?![\w.]) | (?!to=) [^\s<{\[]+ | )
    | (?: to= \s* | \b to \s* [=:]? \s* (?=functions\.) ) (?P<quote> ["']? ) (?P<to> [^\s<{\["']* ) (?P=quote)
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
# After `<|start|>` it is the role, even with text attached, unless a channel follows that text.
_STARTED_ROLE = re.compile(rb"\s*(assistant)(?![^\s<]*<\|channel)")
_CHANNEL_WORD = re.compile("|".join((*CHANNELS, "assistant")))
_OTHER_WORD = re.compile("|".join((*ROLES, *CONTENT_TYPES)))
_NUMBER = re.compile(r"\d+")
# Punctuation that is never a text by itself; quotes and brackets may be a whole JSON answer.
_STRAY_KINDS = frozenset({"Pd", "Pc", "Po"})
_STRAY_SIGNS = frozenset("|>")
_NO_STRAY_SIGNS = frozenset("\"'")


class Part(msgspec.Struct):
    """`kind` is the matching group of `_PARTS`, `tool` for a bare tool name, or `noise`."""

    kind: str
    value: str
    start: int
    value_start: int
    stop: int


def split(raw: bytes, offered: frozenset[str], *, expects_role: bool) -> list[Part]:
    """The parts of a header in order, without whitespace. `expects_role`: it follows `<|start|>`."""
    parts: list[Part] = []
    role = _STARTED_ROLE.match(raw) if expects_role else None
    if role is not None:
        parts.append(Part("role", "assistant", role.start(), role.start(1), role.end()))
    for match in _PARTS.finditer(raw, role.end() if role is not None else 0):
        kind = match.lastgroup or "word"
        if kind == "space":
            continue
        part = Part(kind, match[kind].decode(errors="replace"), match.start(), match.start(kind), match.end())
        if kind == "word":
            _name_word(part, parts, offered, expects_role=expects_role)
        parts.append(part)
    return parts


def _name_word(part: Part, before: list[Part], offered: frozenset[str], *, expects_role: bool) -> None:
    """Classifies a word outside the header grammar, given the parts before it."""
    is_author = expects_role and not before
    if names_tool(part.value, offered) or (is_author and _looks_like_tool(part.value)):
        part.kind = "tool"
    elif is_author and part.value.lower() in ROLES:
        part.kind, part.value = "role", part.value.lower()
    elif before and is_noise(part.value, channel_of(before)):
        part.kind = "noise"


def names_tool(word: str, offered: frozenset[str]) -> bool:
    """Whether a word without `to=` names a tool."""
    return word in offered or (word.startswith("functions.") and word != "functions.")


def _looks_like_tool(author: str) -> bool:
    return is_builtin(author) or all(author.partition("."))


def channel_of(parts: list[Part]) -> str | None:
    """The last valid channel so far."""
    named = (p.value for p in reversed(parts) if p.kind in ("channel", "bare", "glued"))
    return next((value for value in named if value in CHANNELS), None)


def is_noise(text: str, channel: str | None) -> bool:
    """Whether text in a header consists only of header words and stray punctuation: `?commentary?`, `––`.

    A role or content type alone may be an answer, except on analysis and commentary; on commentary, where
    the model writes sentences, numbers are noise, too: `2?`.
    """
    rest = _CHANNEL_WORD.sub("", text)
    if channel in ("analysis", "commentary") or len(rest) < len(text):
        rest = _OTHER_WORD.sub("", rest)
    if channel == "commentary":
        rest = _NUMBER.sub("", rest)
    return all(_is_stray(sign) for sign in rest)


def is_channel_noise(part: Part) -> bool:
    """Whether a word is noise that contains a channel's name, which no sentence starts with."""
    return part.kind == "noise" and _CHANNEL_WORD.search(part.value) is not None


def is_unfinished(part: Part) -> bool:
    """Whether the part could have become header words if the stream had not ended in it."""
    if part.kind == "channel":
        return any(name.startswith(part.value) for name in CHANNELS)
    rest = "".join(itertools.dropwhile(_is_stray, _CHANNEL_WORD.sub("", part.value)))
    return any(word.startswith(rest) for word in (*CHANNELS, *CONTENT_TYPES, *ROLES, "to="))


def _is_stray(sign: str) -> bool:
    is_punctuation = unicodedata.category(sign) in _STRAY_KINDS and sign not in _NO_STRAY_SIGNS
    return is_punctuation or sign.isspace() or sign in _STRAY_SIGNS
