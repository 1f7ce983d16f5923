"""Determines the recipient of a header, and the tool that a malformed name refers to."""

import re
import string

from frontend.harmony.conversation import is_builtin
from frontend.harmony.header_parts import CHANNELS, CONTENT_TYPES, ROLES, Part, is_noise, names_tool

_NAMELESS = frozenset({"", "functions", "functions."})
_UNCALLABLE = _NAMELESS | {"all", *ROLES, *CHANNELS, *CONTENT_TYPES}
_PUNCTUATION = string.punctuation + "–—…"
# Header words attached to a tool's name, where the model omitted the space.
_GLUE = re.compile(r"\W*(?:commentary|analysis|final|json|code|text|assistant|channel|constrain|message|to=)")


def is_uncallable(recipient: str) -> bool:
    """Whether a recipient cannot be a tool: it is a header word or punctuation."""
    bare = recipient.strip(_PUNCTUATION)
    return bare in _UNCALLABLE or is_noise(recipient, "analysis")


def recipient_of(
    parts: list[Part], explicit: list[str], named: list[str], offered: frozenset[str], repairs: list[str]
) -> str | None:
    """The recipient as written, or None."""
    if len(explicit) > 1:
        repairs.append("repeated_recipient")
    if named:
        return named[0]
    if any(value.strip(_PUNCTUATION) in _NAMELESS for value in explicit):
        repairs.append("missing_recipient")
    if any(value.startswith(ROLES) for value in explicit):
        return None
    for part in parts:
        if part.kind == "tool":
            repairs.append("bare_recipient")
            return part.value
        if (
            part.kind in ("channel", "constrain")
            and part.value not in _UNCALLABLE
            and names_tool(part.value, offered)
        ):
            repairs.append(f"{part.kind}_as_recipient")
            return part.value
    return None


def call_name(recipient: str, offered: frozenset[str], repairs: list[str]) -> str | None:
    """The tool that the recipient refers to, or None for a built-in tool that was not offered.

    An unknown name is returned unchanged, unless it is an offered name with header words attached.
    """
    if is_builtin(recipient):
        return recipient if {recipient, recipient.partition(".")[0]} & offered else None
    name = recipient.removeprefix("functions.")
    is_of_namespace = recipient in offered and "." in recipient
    if name == recipient and not is_of_namespace and "bare_recipient" not in repairs:
        repairs.append("bare_recipient")
    if name in offered:
        return name
    meant = _unglued(name, offered)
    if meant is None:
        return name
    repairs.append("glued_name")
    return meant


def _unglued(name: str, offered: frozenset[str]) -> str | None:
    """The longest offered name that equals `name` without trailing header words, namespaces, punctuation."""
    bare = name.strip(_PUNCTUATION)
    meant = [
        tool
        for tool in offered
        if tool == bare
        or (name.startswith(tool) and _GLUE.match(name, len(tool)))
        or bare.endswith((f".{tool}", f"/{tool}", f":{tool}"))
    ]
    return max(meant, key=lambda tool: (len(tool), tool), default=None)
