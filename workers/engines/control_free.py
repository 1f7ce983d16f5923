"""Rewrites xgrammar's EBNF so that allowed text cannot spell control tokens.

xgrammar matches tokens by their text, so control tokens match like other text, and an unsure model writes
them.
"""

import re

# In JSON only strings can spell them. The rest of a string becomes an automaton that allows any text but `<|`
# and a letter; a string with a length limit excludes `|`.
_STRING_REST = r"([^\0-\x1f\"\\\r\n] basic_string_sub)"
_REST_WITHOUT_CONTROL = r'([^<\0-\x1f\"\\\r\n] basic_string_sub) | ("<" after_less)'
_LIMITED, _LIMITED_WITHOUT_CONTROL = r"[^\"\\\r\n]", r"[^|\"\\\r\n]"
_AFTER_LESS = r"""
after_less ::= any_after_less | "|" after_bar | [^<|\0-\x1f\"\\] basic_string_sub
after_bar ::= any_after_less | [^<a-z\0-\x1f\"\\] basic_string_sub
any_after_less ::= "\"" | "<" after_less | "\\" basic_escape basic_string_sub
"""

_QUOTED_OR_CLASS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]')
_CHARACTER = r"(\\U[0-9a-fA-F]{8}|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\.|[^\\])"
_NAMED = dict(zip("0abtnvfre", "\0\a\b\t\n\v\f\r\x1b", strict=True))
_CLASS_ITEM = re.compile(f"{_CHARACTER}(?:-{_CHARACTER})?")


def control_free_json(grammar: str) -> str:
    """A grammar that xgrammar made from a JSON schema, without control tokens."""
    grammar = grammar.replace(_LIMITED, _LIMITED_WITHOUT_CONTROL)
    if _STRING_REST not in grammar:
        return grammar
    return grammar.replace(_STRING_REST, _REST_WITHOUT_CONTROL) + _AFTER_LESS


def control_free(grammar: str) -> str:
    """Any grammar as xgrammar prints it, without control tokens: its character classes exclude `|`, quoted
    text is unchanged.
    """
    return _QUOTED_OR_CLASS.sub(lambda found: _without_bar(found[0]), grammar)


def _without_bar(part: str) -> str:
    if part.startswith('"'):
        return part
    start, items = ("[^", part[2:-1]) if part.startswith("[^") else ("[", part[1:-1])
    if not any(map(_has_bar, _CLASS_ITEM.finditer(items))):
        return part if start == "[" else f"[^|{items}]"
    if start == "[^":
        return part
    items = _CLASS_ITEM.sub(_split_at_bar, items)
    return rf"[\{items}]" if items.startswith("^") else f"[{items}]"


def _has_bar(item: re.Match[str]) -> bool:
    return _decoded(item[1]) <= "|" <= _decoded(item[2] or item[1])


def _split_at_bar(item: re.Match[str]) -> str:
    if not _has_bar(item):
        return item[0]
    first, last = item[1], item[2] or item[1]
    below = "" if first == "|" else f"{first}-{{"
    above = "" if last == "|" else f"}}-{last}"
    return below + above


def _decoded(character: str) -> str:
    """The character that an item of a class spells, perhaps with an escape."""
    name = character.removeprefix("\\")
    if len(name) > 1:
        return chr(int(name[1:], 16))
    return _NAMED.get(name, name) if name != character else character
