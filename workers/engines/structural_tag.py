"""Converts a request's form to an xgrammar structural tag, for TensorRT-LLM and vLLM.

Works with every xgrammar since 0.1.25 (tested: 0.1.25, 0.2.1, 0.2.8). Early releases have no optional or
repeated formats, no tags without a separator, none that end with the answer, and no tokens: control tokens
are text, which ordinary tokens may spell as well.
"""

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

# For control tokens as text: any text but `<|` and a letter. Each rule is a state of an automaton that reads
# `[^<]*` at once, so a mask over 200,000 tokens takes 20 us; with a regex, 100 ms.
_TEXT = r"""
text ::= [^<]* rest
rest ::= "" | "<" after_less
after_less ::= "" | "<" after_less | "|" after_bar | [^<|] [^<]* rest
after_bar ::= "" | "<" after_less | [^<a-z] [^<]* rest
"""

# For control tokens as tokens: only JSON strings could still spell them, which an unsure model does. So the
# rest of a string follows the same automaton; a string with a length limit has no `|`. White space is
# limited, since an unsure model would write it forever.
_STRING_REST = r"([^\0-\x1f\"\\\r\n] basic_string_sub)"
_REST_WITHOUT_CONTROL = r'([^<\0-\x1f\"\\\r\n] basic_string_sub) | ("<" after_less)'
_LIMITED, _LIMITED_WITHOUT_CONTROL = r"[^\"\\\r\n]", r"[^|\"\\\r\n]"
_AFTER_LESS = r"""
after_less ::= any_after_less | "|" after_bar | [^<|\0-\x1f\"\\] basic_string_sub
after_bar ::= any_after_less | [^<a-z\0-\x1f\"\\] basic_string_sub
any_after_less ::= "\"" | "<" after_less | "\\" basic_escape basic_string_sub
"""
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
    or with an older xgrammar, as text. A schema appears once, however many headers its message has. Raises
    InvalidRequest for an invalid schema, or for one of a leading message.
    """
    ids = control_ids if _xgrammar() else {}
    elements: list[dict[str, object]] = [{"type": "or", "elements": list(_last(form.last, ids))}]
    if form.leading:
        elements.insert(0, _texts(form.leading, "?" if form.leads_once else "*", ids))
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    return msgspec.json.encode(tag).decode()


def _last(messages: Iterable[MessageForm], ids: Ids) -> Iterator[dict[str, object]]:
    if texts := [message for message in messages if message.schema is None]:
        yield _texts(texts, "", ids)
    for message in messages:
        if message.schema is not None:
            yield _with_schema(message, ids)


def _with_schema(message: MessageForm, ids: Ids) -> dict[str, object]:
    elements = [_grammar(_headers(message, ids)), _body(message, ids)]
    if message.end != _EOS:
        elements.append(_grammar(_literal(message.end, ids)))
    return {"type": "sequence", "elements": elements}


def _body(message: MessageForm, ids: Ids) -> dict[str, object]:
    try:
        schema = msgspec.json.decode(message.schema or "", type=dict[str, object])
        if ids and (xgrammar := _xgrammar()):
            made = xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=_MAX_WHITE_SPACE)
            return {"type": "grammar", "grammar": _without_control(str(made))}
    except (msgspec.DecodeError, RuntimeError, ValueError) as error:
        problem = str(error).strip()
        reason = f"`{message.param}` is not a valid schema: {problem}."
        raise InvalidRequest(reason, param=message.param) from error
    return {"type": "json_schema", "json_schema": schema}


def _without_control(json_grammar: str) -> str:
    json_grammar = json_grammar.replace(_LIMITED, _LIMITED_WITHOUT_CONTROL)
    if _STRING_REST not in json_grammar:
        return json_grammar
    return json_grammar.replace(_STRING_REST, _REST_WITHOUT_CONTROL) + _AFTER_LESS


def _texts(messages: Iterable[MessageForm], times: str, ids: Ids) -> dict[str, object]:
    """Messages with any text, in one grammar: its `text` rule dominates the compile time."""
    alternatives = " | ".join(_text_message(message, ids) for message in messages)
    excluded = ", ".join(str(token_id) for token_id in ids.values())
    text = f"\ntext ::= ExcludeToken({excluded})*" if ids else _TEXT
    return _grammar(f"({alternatives}){times}{text}")


def _text_message(message: MessageForm, ids: Ids) -> str:
    if message.schema is not None:
        raise InvalidRequest("A leading message's schema cannot be enforced.", param=message.param)
    end = "" if message.end == _EOS else _literal(message.end, ids)
    return f"(({_headers(message, ids)}) text {end})"


def _grammar(root: str) -> dict[str, object]:
    return {"type": "grammar", "grammar": f"root ::= {root}"}


def _headers(message: MessageForm, ids: Ids) -> str:
    return " | ".join(_literal(header, ids) for header in message.headers)


def _literal(text: str, ids: Ids) -> str:
    """Text in EBNF, with control tokens as themselves."""
    parts = filter(None, _CONTROL.split(text))
    return " ".join(f"Token({ids[part]})" if part in ids else json.dumps(part) for part in parts)
