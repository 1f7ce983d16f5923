"""Converts a request's form to an xgrammar structural tag, for TensorRT-LLM and vLLM, also behind Dynamo.

Works with every xgrammar since 0.1.25 (tested: 0.1.25, 0.2.1, 0.2.7, 0.2.8). Early releases have no optional
or repeated formats, no tags without a separator, none that end with the answer, and no tokens: control tokens
are text, which ordinary tokens may spell as well."""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from types import ModuleType

import msgspec

from baton.errors import InvalidRequest
from baton.messages import Guided, MessageForm

# The tokenizer's eos token is xgrammar's stop token: it comes when the grammar is complete, not as text.
_EOS = "<|return|>"
_CONTROL = re.compile(r"(<\|\w+\|>)")
# xgrammar takes `[\^a]` for `[^a]`, the opposite; within JSON schemas, some releases do.
_CARET_FIRST = re.compile(r"(?<!\\)(?:\\\\)*\[\\(?:\^|x5e|u005e|U0000005e)", re.IGNORECASE)
_TOKEN_RULE = re.compile(r"(Token|Dispatch)\w*\s*\(|<\|")

# For control tokens as text: any text but `<|` and a letter. Each rule is a state of an automaton that reads
# `[^<]*` at once, so a mask over 200,000 tokens takes 20 us; with a regex, 100 ms.
_TEXT = r"""
text ::= [^<]* rest
rest ::= "" | "<" after_less
after_less ::= "" | "<" after_less | "|" after_bar | [^<|] [^<]* rest
after_bar ::= "" | "<" after_less | [^<a-z] [^<]* rest
"""

# An unsure model would write white space forever.
_MAX_WHITE_SPACE = 17  # a line break and 16 spaces of indentation

Ids = Mapping[str, int]


@functools.cache
def _xgrammar() -> ModuleType | None:
    """The installed xgrammar, if it supports tokens (0.2 and later)."""
    try:
        xgrammar = import_module("xgrammar")
    except ImportError:
        return None
    return xgrammar if hasattr(xgrammar.structural_tag, "TokenFormat") else None


def structural_tag(form: Guided, control_ids: Ids) -> str:
    """The form as xgrammar's JSON: any number of leading messages (or at most one), then one last.

    `control_ids` are the ids of the tokenizer's control tokens, which are demanded as tokens; without them,
    or with an older xgrammar, as text. A grammar appears once, however many headers its message has. Raises
    InvalidRequest for an invalid grammar, or for one of a leading message."""
    ids = control_ids if control_ids and _xgrammar() else {}  # its import takes seconds
    texts = [message for message in form.last if message.grammar is None]
    last = [_texts(texts, "", ids)] if texts else []
    last += [_with_grammar(message, ids) for message in form.last if message.grammar is not None]
    elements: list[dict[str, object]] = [{"type": "or", "elements": last}]
    if form.leading:
        elements.insert(0, _texts(form.leading, "?" if form.leads_once else "*", ids))
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    return msgspec.json.encode(tag).decode()


def _with_grammar(message: MessageForm, ids: Ids) -> dict[str, object]:
    try:
        body = _body(message, _xgrammar() if ids else None)
    except (msgspec.DecodeError, RuntimeError, ValueError) as error:
        problem = str(error).strip()
        raise InvalidRequest(
            f"`{message.param}` cannot be enforced: {problem}.", param=message.param
        ) from error
    elements = [_grammar(_headers(message, ids)), body]
    if message.end != _EOS:
        end = _literal(message.end, ids)
        # vLLM 0.31 has xgrammar take the request's stop tokens, such as `<|call|>`, as stop tokens: after the
        # whole grammar only. So an end that is text may be missing.
        elements.append(_grammar(end if ids else f"({end})?"))
    return {"type": "sequence", "elements": elements}


def _body(message: MessageForm, xgrammar: ModuleType | None) -> dict[str, object]:
    """Text that follows the message's grammar, without control tokens if `xgrammar` supports tokens. Raises
    what xgrammar and msgspec raise."""
    text = message.grammar or ""
    is_schema = message.syntax == "json_schema"
    schema = msgspec.json.decode(text, type=dict[str, object]) if is_schema else {}
    if any(map(_CARET_FIRST.search, _patterns(schema) if is_schema else [text])):
        raise ValueError(r"a class of characters cannot begin with `\^`; `[a\^]` is allowed")
    match message.syntax:
        case "json_schema":
            if xgrammar is None:
                found = {"type": "json_schema", "json_schema": schema}
                return found | {"max_whitespace_cnt": _MAX_WHITE_SPACE}  # ignored before 0.2.7
            # Objects are as open as the schema says, as in llguidance.
            made = xgrammar.Grammar.from_json_schema(
                schema, strict_mode=False, max_whitespace_cnt=_MAX_WHITE_SPACE
            )
            return {"type": "grammar", "grammar": control_free_json(str(made))}
        case "regex":
            if xgrammar is None:
                return {"type": "regex", "pattern": text}
            return {"type": "grammar", "grammar": control_free(str(xgrammar.Grammar.from_regex(text)))}
        case "ebnf" if _TOKEN_RULE.search(text):
            raise ValueError("a grammar cannot name tokens")
        case "ebnf":
            grammar = text if xgrammar is None else control_free(str(xgrammar.Grammar.from_ebnf(text)))
            return {"type": "grammar", "grammar": grammar}
        case "lark":
            raise ValueError("this model's engine supports EBNF and regular expressions, not Lark")


def _patterns(schema: object) -> Iterator[str]:
    """The regular expressions in a JSON schema."""
    values = [schema]
    while values:
        match values.pop():
            case dict() as value:
                values += value.values()
                if isinstance(pattern := value.get("pattern"), str):
                    yield pattern
                if isinstance(named := value.get("patternProperties"), dict):
                    yield from named
            case list() as value:
                values += value


def _texts(messages: Iterable[MessageForm], times: str, ids: Ids) -> dict[str, object]:
    """Messages with any text, in one grammar: its `text` rule dominates the compile time."""
    alternatives = []
    for message in messages:
        if message.grammar is not None:
            raise InvalidRequest("A leading message's grammar cannot be enforced.", param=message.param)
        end = "" if message.end == _EOS else _literal(message.end, ids)
        alternatives.append(f"(({_headers(message, ids)}) text {end})")
    excluded = ", ".join(str(token_id) for token_id in ids.values())
    text = f"\ntext ::= ExcludeToken({excluded})*" if ids else _TEXT
    return _grammar(f"({' | '.join(alternatives)}){times}{text}")


def _grammar(root: str) -> dict[str, object]:
    return {"type": "grammar", "grammar": f"root ::= {root}"}


def _headers(message: MessageForm, ids: Ids) -> str:
    return " | ".join(_literal(header, ids) for header in message.headers)


def _literal(text: str, ids: Ids) -> str:
    """Text in EBNF, with control tokens as themselves."""
    parts = filter(None, _CONTROL.split(text))
    return " ".join(f"Token({ids[part]})" if part in ids else json.dumps(part) for part in parts) or '""'


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
    text is unchanged."""
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
