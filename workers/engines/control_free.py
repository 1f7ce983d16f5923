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
    if part.startswith('"') or re.fullmatch(part, "|") is None:
        return part
    if part.startswith("[^"):
        return f"[^|{part[2:]}"
    return "[" + "".join(_split_at_bar(item) for item in _CLASS_ITEM.finditer(part[1:-1])) + "]"


def _split_at_bar(item: re.Match[str]) -> str:
    first, last = item[1], item[2] or item[1]
    if re.fullmatch(f"[{first}-{last}]", "|") is None:
        return item[0]
    below = "" if first == "|" else f"{first}-{{"
    above = "" if last == "|" else f"}}-{last}"
    return below + above
