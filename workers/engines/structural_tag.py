"""From a request's form to the structural tag that xgrammar enforces, in TensorRT-LLM and in vLLM."""

from collections.abc import Iterator

import msgspec

from baton.errors import InvalidRequest
from baton.messages import Guided, MessageForm

# The tokenizer's eos token is xgrammar's stop token: it comes when the grammar is complete, not as text.
_EOS = "<|return|>"


def structural_tag(form: Guided) -> str:
    """The form as xgrammar's JSON: any number of leading messages (or one at most), then one last.

    Raises InvalidRequest for a schema that is none.
    """
    last: dict[str, object] = {
        "type": "or",
        "elements": [tag for message in form.last for tag in _tags(message)],
    }
    elements = [last]
    if form.leading:
        tags = [tag for message in form.leading for tag in _tags(message)]
        leading = {"type": "tags_with_separator", "tags": tags, "separator": "", "at_least_one": False}
        elements.insert(0, leading | {"stop_after_first": form.leads_once})
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    return msgspec.json.encode(tag).decode()


def _tags(message: MessageForm) -> Iterator[dict[str, object]]:
    end = "" if message.end == _EOS else message.end
    for header in message.headers:
        yield {"type": "tag", "begin": header, "content": _content(message), "end": end}


def _content(message: MessageForm) -> dict[str, object]:
    if message.schema is None:
        return {"type": "any_text"}
    try:
        schema = msgspec.json.decode(message.schema, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{message.param}` is no schema: {error}.", param=message.param) from error
    return {"type": "json_schema", "json_schema": schema}
