"""The grammar of a message header, and what is made of headers that break it.

A header names a role, a channel, a recipient and a content type, in any order. gpt-oss breaks it in about one
turn of twenty-five, in ways that are known; each has a rule here and a name in `REPAIRS`.
"""

import re
import string

import msgspec

from frontend.harmony.builtin_tools import BUILTIN_TOOLS, is_builtin

ROLES = ("assistant", "user", "system", "developer", "tool")
CHANNELS = ("analysis", "commentary", "final")
CONTENT_TYPES = ("json", "code", "text", "none")
_NAMELESS = frozenset({"", "functions", "functions."})
_NOBODY = _NAMELESS | {"all", *ROLES, *CHANNELS, *CONTENT_TYPES}

# One alternative a kind of part. A control token counts as one even where the model spelled it in ordinary
# text: it learns that from histories in which names had control text glued to them.
_PARTS = re.compile(
    rb"""
      (?P<space> \s+ )
    | <\|channel\|>   \s* (?P<channel> analysis | commentary | final | (?!to=) [^\s<]+ | )
    | <\|constrain\|> \s* (?P<constrain> (?:json|code|text|none)(?![\w.]) | (?!to=) [^\s<{\[]+ | )
    | to= \s* (?P<quote> ["']? ) (?P<to> [^\s<{\["']* ) (?P=quote)
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
# After `<|start|>` it is the role, whatever text is stuck to it; but no other word is before a channel.
_STARTED_ROLE = re.compile(rb"\s*(assistant)(?![^\s<]*<\|channel)")
# What follows a tool's name where the model forgot the space between header words.
_GLUE = re.compile(r"\W*(?:commentary|analysis|final|json|code|text|assistant|channel|constrain|message|to=)")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """A header that was read. `call` is the tool's name (None: no call), without `functions.`.

    `hidden` says that the message is for nobody here: a built-in tool that was not offered, or the words of
    a tool or a user that the model made up. `text` is the byte range of the raw header that is no header at
    all; it is empty if all of it was understood.
    """

    has_role: bool = False
    channel: str | None = None
    call: str | None = None
    hidden: bool = False
    text: tuple[int, int] = (0, 0)
    repairs: tuple[str, ...] = ()


class _Part(msgspec.Struct):
    """`kind` is the group of `_PARTS` that matched, or `tool` for a bare word that names a tool."""

    kind: str
    value: str
    start: int
    value_start: int
    stop: int


def read_header(raw: bytes, offered: frozenset[str], *, expects_role: bool) -> Header:
    """A header that `<|message|>` ended: all of `raw` was meant as header, control tokens spelled out.

    Of the words that mean nothing, the first may be a role, if one is due; a single one at the end may be a
    content type; all others are text.
    """
    parts = _split(raw, offered, expects_role=expects_role)
    unknown = [part for part in parts if part.kind == "word"]
    repairs = []
    has_strange_role = bool(unknown) and unknown[0] is parts[0]
    if expects_role and has_strange_role and all(part.kind == "channel" for part in parts[1:2]):
        unknown.pop(0)
        repairs.append("wrong_role")
    if len(unknown) == 1 and unknown[0] is parts[-1] and len(parts) > 1:
        unknown.pop()
        repairs.append("unknown_content_type")
    if any(part.kind == "control" for part in parts):
        repairs.append("control_text")
    text = (unknown[0].start, unknown[-1].stop) if unknown else (0, 0)
    return _fold(parts, offered, text, repairs)


def read_unended_header(
    raw: bytes, offered: frozenset[str], *, expects_role: bool, is_cut: bool = False
) -> Header:
    """A header without `<|message|>`: the first thing that is no header word begins the message's text.

    `is_cut` says that the stream ended here: a last word that was going to be a header word is no text.
    """
    parts = _split(raw, offered, expects_role=expects_role)
    for i, part in enumerate(parts):
        start = _text_start(parts, i, raw, expects_role)
        if start is None or (is_cut and i == len(parts) - 1 and _is_unfinished(part)):
            continue
        return _fold(parts[: i + (part.kind == "channel")], offered, (start, len(raw)), ["missing_message"])
    return _fold(parts, offered, (len(raw), len(raw)), ["missing_message"])


def _split(raw: bytes, offered: frozenset[str], *, expects_role: bool) -> list[_Part]:
    parts = []
    role = _STARTED_ROLE.match(raw) if expects_role else None
    if role is not None:
        parts.append(_Part("role", "assistant", role.start(), role.start(1), role.end()))
    for match in _PARTS.finditer(raw, role.end() if role is not None else 0):
        kind = match.lastgroup or "word"
        if kind == "space":
            continue
        value, value_start = match[kind].decode(errors="replace"), match.start(kind)
        if kind == "word" and _names_tool(value, offered):
            kind = "tool"
        parts.append(_Part(kind, value, match.start(), value_start, match.end()))
    return parts


def _text_start(parts: list[_Part], i: int, raw: bytes, expects_role: bool) -> int | None:
    """Where text begins if part `i` cannot belong to a header that `<|message|>` does not end."""
    part = parts[i]
    following = parts[i + 1] if i + 1 < len(parts) else None
    is_header_next = following is not None and following.kind in ("channel", "constrain", "to")
    match part.kind:
        case "channel":
            known = part.value in CHANNELS or not part.value or is_header_next
        case "constrain":
            known = part.value in CONTENT_TYPES or not part.value or is_header_next
        case "to" | "glued":
            known = True
        case "role":
            known = i == 0 and (part.value == "assistant" or is_header_next)
        case "bare":
            known = is_header_next
        case "type":
            has_recipient = any(earlier.kind in ("to", "tool") for earlier in parts[:i])
            known = has_recipient or (following is not None and following.kind == "to")
        case "tool":
            known = (
                is_header_next or part.value.startswith("functions.") or raw[part.stop :].lstrip()[:1] == b"{"
            )
        case _:
            known = expects_role and i == 0 and following is not None and following.kind == "channel"
    return None if known else part.value_start


def _is_unfinished(part: _Part) -> bool:
    """Whether more of the stream could have made a header word of it."""
    words = CHANNELS if part.kind == "channel" else (*CHANNELS, *CONTENT_TYPES, *ROLES, "to=")
    return any(word.startswith(part.value) for word in words)


def _fold(parts: list[_Part], offered: frozenset[str], text: tuple[int, int], repairs: list[str]) -> Header:
    channel = _channel(parts, repairs)
    recipient = _recipient(parts, offered, repairs)
    types = [part.value for part in parts if part.kind == "constrain" and part.value != recipient]
    if any(value and value not in CONTENT_TYPES for value in types):
        repairs.append("unknown_content_type")
    if recipient is not None:
        call = _call_name(recipient, offered, repairs)
        hidden = call is None
    else:
        call = None
        # `functions.f to=assistant` or `user`: what the model made up itself.
        hidden = _is_by_another(parts) and channel != "final"
    if channel is None and recipient is None and not hidden:
        repairs.append("missing_channel")
    has_role = bool(parts) and parts[0].kind in ("role", "tool", "word")
    return Header(
        has_role=has_role, channel=channel, call=call, hidden=hidden, text=text, repairs=tuple(repairs)
    )


def _is_by_another(parts: list[_Part]) -> bool:
    author = parts[0] if parts else None
    return author is not None and author.kind in ("role", "tool") and author.value != "assistant"


def _channel(parts: list[_Part], repairs: list[str]) -> str | None:
    """The last channel that is one: of a doubled channel, the second is what the model decided on."""
    named = [part for part in parts if part.kind in ("channel", "bare", "glued")]
    if any(part.kind != "channel" for part in named):
        repairs.append("missing_channel_marker")
    if len(named) > 1:
        repairs.append("repeated_channel")
    known = [part.value for part in named if part.value in CHANNELS]
    if known or not named:
        return known[-1] if known else None
    repairs.append("unknown_channel")
    word = named[-1].value.lower()
    return next((name for name in CHANNELS if word and name.startswith(word)), None)


def _recipient(parts: list[_Part], offered: frozenset[str], repairs: list[str]) -> str | None:
    """Who is called, as written; None if nobody is."""
    explicit = [part.value for part in parts if part.kind == "to"]
    named = [value for value in explicit if value not in _NOBODY or value in offered]
    if len(explicit) > 1:
        repairs.append("repeated_recipient")
    if named:
        return named[0]
    if not _NAMELESS.isdisjoint(explicit):
        repairs.append("missing_recipient")
    if any(value in ROLES for value in explicit):
        return None
    for part in parts:
        if part.kind == "tool":
            repairs.append("bare_recipient")
            return part.value
        if (
            part.kind in ("channel", "constrain")
            and part.value not in _NOBODY
            and _names_tool(part.value, offered)
        ):
            repairs.append(f"{part.kind}_as_recipient")
            return part.value
    return None


def _names_tool(word: str, offered: frozenset[str]) -> bool:
    return word in offered or (word.startswith("functions.") and word != "functions.")


def _call_name(recipient: str, offered: frozenset[str], repairs: list[str]) -> str | None:
    """The tool that is meant, or None for a built-in tool that was not offered.

    A name that nobody offered is passed on as it is, unless it is an offered one with something glued to it.
    """
    if is_builtin(recipient, BUILTIN_TOOLS):
        return recipient if recipient in offered or is_builtin(recipient, offered) else None
    name = recipient.removeprefix("functions.")
    if name == recipient:
        repairs.append("bare_recipient")
    if name in offered:
        return name
    meant = _unglued(name, offered)
    if meant is None:
        return name
    repairs.append("glued_name")
    return meant


def _unglued(name: str, offered: frozenset[str]) -> str | None:
    """The longest offered name that is all of `name` but header words after it, namespaces, punctuation."""
    bare = name.strip(string.punctuation)
    meant = [
        tool
        for tool in offered
        if tool == bare
        or (name.startswith(tool) and _GLUE.match(name, len(tool)))
        or bare.endswith((f".{tool}", f"/{tool}", f":{tool}"))
    ]
    return max(meant, key=lambda tool: (len(tool), tool), default=None)
