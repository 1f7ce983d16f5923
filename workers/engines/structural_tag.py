"""From a request's form to the structural tag that xgrammar enforces, in TensorRT-LLM and in vLLM.

Written so that every xgrammar since 0.1.25, TensorRT-LLM 1.2's, takes it (tried: 0.1.25, 0.2.1, 0.2.8). Early
ones know no optional and no repeated formats, no tags without a separator, none that end with the answer.
"""

import json
from collections.abc import Iterable, Iterator

import msgspec

from baton.errors import InvalidRequest
from baton.messages import Guided, MessageForm

# The tokenizer's eos token is xgrammar's stop token: it comes when the grammar is complete, not as text.
_EOS = "<|return|>"

# Any text but `<|` and a letter, for to xgrammar control tokens are text like any other. Each rule is a state
# of an automaton that reads `[^<]*` at once: a mask of 200,000 tokens then takes 20 us; with a regex, 100 ms.
_TEXT = r"""
text ::= [^<]* rest
rest ::= "" | "<" after_less
after_less ::= "" | "<" after_less | "|" after_bar | [^<|] [^<]* rest
after_bar ::= "" | "<" after_less | [^<a-z] [^<]* rest
"""


def structural_tag(form: Guided) -> str:
    """The form as xgrammar's JSON: any number of leading messages (or one at most), then one last.

    A schema stands there once, however many headers its message may have. Raises InvalidRequest for one that
    is none, or that is a leading message's.
    """
    elements: list[dict[str, object]] = [{"type": "or", "elements": list(_last(form.last))}]
    if form.leading:
        elements.insert(0, _texts(form.leading, "?" if form.leads_once else "*"))
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    return msgspec.json.encode(tag).decode()


def _last(messages: Iterable[MessageForm]) -> Iterator[dict[str, object]]:
    if texts := [message for message in messages if message.schema is None]:
        yield _texts(texts, "")
    for message in messages:
        if message.schema is not None:
            yield _with_schema(message)


def _with_schema(message: MessageForm) -> dict[str, object]:
    headers = [{"type": "const_string", "value": header} for header in message.headers]
    elements = [{"type": "or", "elements": headers}, _body(message)]
    if message.end != _EOS:
        elements.append({"type": "const_string", "value": message.end})
    return {"type": "sequence", "elements": elements}


def _body(message: MessageForm) -> dict[str, object]:
    try:
        schema = msgspec.json.decode(message.schema or "", type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{message.param}` is no schema: {error}.", param=message.param) from error
    return {"type": "json_schema", "json_schema": schema}


def _texts(messages: Iterable[MessageForm], times: str) -> dict[str, object]:
    """Messages of any text, in one grammar: what it costs to compile is its `_TEXT`."""
    alternatives = " | ".join(_text_message(message) for message in messages)
    return {"type": "grammar", "grammar": f"root ::= ({alternatives}){times}{_TEXT}"}


def _text_message(message: MessageForm) -> str:
    if message.schema is not None:
        raise InvalidRequest("A leading message's schema cannot be enforced.", param=message.param)
    headers = " | ".join(json.dumps(header) for header in message.headers)
    end = "" if message.end == _EOS else json.dumps(message.end)
    return f"(({headers}) text {end})"
