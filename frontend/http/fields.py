"""Which fields of a body are served: the table of those refused by name, and the search for unknown ones."""

import re
from collections.abc import Mapping
from typing import TypeVar, get_args

import msgspec

from baton.errors import InvalidRequest
from frontend.responses.body import LOGPROBS, Reasoning, ResponseBody, TextConfig
from frontend.schema import (
    ChatBody,
    CompletionBody,
    Effort,
    Nvext,
    StreamOptions,
    TemplateArgs,
)

Body = TypeVar("Body", bound=msgspec.Struct)
Table = Mapping[str, tuple[tuple[object, ...], str]]

# Fields that the APIs or the guides define and Baton does not serve: (values that ask for nothing, reason).
# `null` asks for nothing everywhere.
_GUIDED: Table = dict.fromkeys(
    ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    ((), "Ask chat completions for a form of the answer with `response_format`."),
)
_CHATS_NAMES: Table = {
    "messages": ((), "Responses call it `input`."),
    "max_tokens": ((), "Responses call it `max_output_tokens`."),
    "max_completion_tokens": ((), "Responses call it `max_output_tokens`."),
    "response_format": ((), "Responses call it `text.format`."),
    "reasoning_effort": ((), "Responses call it `reasoning.effort`."),
    "logprobs": ((False,), f'Responses call it `include`: ["{LOGPROBS}"].'),
    "n": ((1,), "A response has one answer."),
    "stop": (([],), "Responses have no stop strings; `stop_token_ids` are served."),
}
_NOT_SERVED: dict[type[msgspec.Struct], Table] = {
    ChatBody: {
        **_GUIDED,
        "audio": ((), "Answers are text; there is no audio output."),
        "modalities": ((["text"],), 'Answers are text: only ["text"] can be asked for.'),
        "functions": (([],), "It is deprecated: use `tools`."),
        "function_call": (("none", "auto"), "It is deprecated: use `tool_choice`."),
        "prediction": ((), "There are no predicted outputs."),
        "web_search_options": ((), "There is no web search."),
        "moderation": ((), "There is no moderation."),
        "store": ((False,), "Chat completions are not stored."),
        "service_tier": (("auto", "default"), "There is one service tier: `default`."),
        "verbosity": (("medium",), "gpt-oss does not know it; ask for brevity in the instructions."),
        "prompt_cache_retention": (("in_memory",), "There is no prompt cache to keep longer."),
        "prompt_cache_options": (({}, {"mode": "implicit"}), "There is no prompt cache to steer."),
    },
    CompletionBody: {
        **_GUIDED,
        "suffix": (("",), "Text cannot be inserted before a suffix."),
        "echo": ((False,), "The prompt is not echoed; put it before the answer yourself."),
        "best_of": ((1,), "Answers are not ranked; use `n`."),
    },
    ResponseBody: {
        **_CHATS_NAMES,
        "access_programs": ((), "There are no access programs."),
        "background_options": (({}, {"completion_window": "soonest"}), "Background work begins at once."),
        "context_management": (([],), "The context is not managed: send what the model shall read."),
        "conversation": ((), "There are no conversation objects; use `previous_response_id`."),
        "image": (({},), "Input and answers are text."),
        "moderation": ((), "There is no moderation."),
        "prompt": ((), "There are no stored prompt templates."),
        "prompt_cache_options": (({}, {"mode": "implicit"}), "There is no prompt cache to steer."),
        "prompt_cache_retention": (("in_memory",), "There is no prompt cache to keep longer."),
        "service_tier": (("auto", "default"), "There is one service tier: `default`."),
        "truncation": (("disabled",), "Nothing is left out of the input."),
    },
    Reasoning: {
        "context": (("auto", "current_turn"), "Reasoning is kept up to the next final answer."),
        "generate_summary": (("auto",), "There are no summaries; the reasoning itself is given."),
        "mode": (("standard",), "There is one mode: `standard`."),
    },
    TextConfig: {
        "verbosity": (("medium",), "gpt-oss does not know it; ask for brevity in the instructions."),
    },
    Nvext: _GUIDED,
    StreamOptions: {"include_obfuscation": ((False,), "Streams are not padded.")},
    TemplateArgs: {},
}
# They change nothing in an answer by their definition, so whatever they say is served.
_HINTS = frozenset({"safety_identifier", "prompt_cache_key"})
_NESTED: dict[str, type[msgspec.Struct]] = {
    "nvext": Nvext,
    "reasoning": Reasoning,
    "text": TextConfig,
    "stream_options": StreamOptions,
    "chat_template_args": TemplateArgs,
    "chat_template_kwargs": TemplateArgs,
}

_AT = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$")
# By the last word of a field's path.
_ALLOWED = {
    "reasoning_effort": ", ".join(get_args(Effort)),
    "effort": ", ".join(get_args(Effort)),
    "role": "system, developer, user, assistant, tool",
    "tool_choice": "none, auto, required",
    "mode": "auto, required",
}


# A surrogate pair, a lone surrogate, or any other escape, so that an escaped backslash is passed over.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


def _mend(escape: re.Match[bytes]) -> bytes:
    """Half a character, which clients write when they cut text, becomes the replacement character."""
    return rb"\ufffd" if escape[1] else escape[0]


def decode(raw: bytes, body_type: type[Body]) -> tuple[Body, tuple[str, ...]]:
    """The validated body, and the paths of the fields in it that nobody knows, sorted.

    Raises InvalidRequest for anything that is not served, `param` naming the field as `messages[0].role`.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        unknown = _unknown(fields, body_type)
        for name in _NESTED.keys() & fields.keys() & set(body_type.__struct_encode_fields__):
            if bytes(fields[name]).startswith(b"{"):
                inner = msgspec.json.decode(fields[name], type=dict[str, msgspec.Raw])
                unknown += _unknown(inner, _NESTED[name], name + ".")
        return msgspec.json.decode(raw, type=body_type), tuple(sorted(unknown))
    except msgspec.ValidationError as error:
        raise named_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        mended = _ESCAPE.sub(_mend, raw)
        if mended != raw:
            return decode(mended, body_type)
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None


def _unknown(fields: Mapping[str, msgspec.Raw], struct: type[msgspec.Struct], path: str = "") -> list[str]:
    """Paths of the fields that nobody knows; raises InvalidRequest for one that is known and not served."""
    table = _NOT_SERVED.get(struct, {})
    for name in fields.keys() & table.keys():
        harmless, reason = table[name]
        value = msgspec.json.decode(fields[name])
        # The types are compared too: 0 is not False, 1.0 not 1.
        if value is not None and not any(value == v and type(value) is type(v) for v in harmless):
            raise InvalidRequest(f"`{path}{name}` is not served: {reason}", param=path + name)
    known = table.keys() | set(struct.__struct_encode_fields__) | (_HINTS if not path else set())
    return [path + name for name in fields if name not in known]


def named_error(text: str, inside: str = "") -> InvalidRequest:
    """msgspec's complaint as an error that names the field; `inside` is the path of what was decoded."""
    parts = _AT.match(text)
    what, path = (parts["what"], parts["path"] or "") if parts else (text, "")
    path = ".".join(name for name in (inside, path.replace("[...]", "")) if name)
    missing = _MISSING.match(what)
    if missing:
        path = f"{path}.{missing['field']}".lstrip(".")
        return InvalidRequest(f"`{path}` is missing.", param=path)
    allowed = _ALLOWED.get(path.rpartition(".")[2])
    if allowed and what.startswith("Invalid"):
        what += f", must be one of {allowed}"
    return InvalidRequest(f"`{path or 'body'}`: {what}.", param=path or None)
