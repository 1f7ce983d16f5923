"""A Responses body in the chat API's terms: tools, forms and sampling are the same there, errors renamed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from msgspec import structs

from baton.errors import BatonError, InvalidRequest
from baton.messages import Guided
from frontend import schema as chat
from frontend.responses.body import (
    FunctionByName,
    FunctionsByName,
    ResponseBody,
    ResponseTool,
    SchemaFormat,
)

_SHARED = frozenset(ResponseBody.__struct_fields__) & frozenset(chat.ChatBody.__struct_fields__) - {
    "tools", "tool_choice", "top_logprobs",
}  # fmt: skip
# A field's name is a whole `param`, or stands in backticks in a message.
_NEW_NAMES = (
    (re.compile(r"(^|`)response_format(?:\.json_schema)?"), r"\1text.format"),
    (re.compile(r"(^|`)messages"), r"\1input"),
    (re.compile(r"(tools\[\d+\])\.function\b"), r"\1"),
)


def in_chat_terms(body: ResponseBody) -> chat.ChatBody:
    """A chat body without messages that asks for the same. Raises InvalidRequest, naming the field."""
    return chat.ChatBody(
        messages=[],
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())],
        tool_choice=_tool_choice(body),
        response_format=_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        **{name: getattr(body, name) for name in _SHARED},
    )


@contextmanager
def renamed_errors() -> Iterator[None]:
    """Errors of chat's functions, with the names that the fields have in a Responses body."""
    try:
        yield
    except BatonError as error:
        param = None if error.param is None else _renamed(error.param)
        raise type(error)(_renamed(error.message), param=param) from None


def renamed_form(form: Guided | None) -> Guided | None:
    """The form with those names, which a worker that cannot enforce it will tell."""
    if form is None:
        return None
    last = (structs.replace(m, param=None if m.param is None else _renamed(m.param)) for m in form.last)
    return structs.replace(form, last=tuple(last))


def _renamed(text: str) -> str:
    for old, new in _NEW_NAMES:
        text = old.sub(new, text)
    return text


def _tool(tool: ResponseTool, path: str) -> chat.ToolDefinition:
    if tool.type != "function":
        raise InvalidRequest(
            f"`{path}.type` {tool.type!r} is not served: only functions are.", param=f"{path}.type"
        )
    if tool.name is None:
        raise InvalidRequest(f"`{path}.name` is missing.", param=f"{path}.name")
    refused = {
        "defer_loading": tool.defer_loading,
        "async": tool.is_async,
        "output_schema": tool.output_schema is not None,
        "allowed_callers": "direct" not in (tool.allowed_callers or ["direct"]),
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise InvalidRequest(f"`{path}.{name}` is not served.", param=f"{path}.{name}")
    return chat.ToolDefinition(
        function=chat.FunctionTool(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
    )


def _tool_choice(
    body: ResponseBody,
) -> Literal["none", "auto", "required"] | chat.FunctionChoice | chat.AllowedToolsChoice | None:
    match body.tool_choice:
        case FunctionByName(name=name):
            return chat.FunctionChoice(function=chat.NamedFunction(name=name))
        case FunctionsByName(mode=mode, tools=tools):
            allowed = [chat.AllowedTool(function=chat.NamedFunction(name=tool.name)) for tool in tools]
            return chat.AllowedToolsChoice(allowed_tools=chat.AllowedTools(mode=mode, tools=allowed))
        case choice:
            return choice


def _format(
    body: ResponseBody,
) -> chat.TextFormat | chat.JsonObjectFormat | chat.JsonSchemaFormat | None:
    asked = None if body.text is None else body.text.format
    if not isinstance(asked, SchemaFormat):
        return asked
    named = {field: getattr(asked, field) for field in chat.NamedSchema.__struct_fields__}
    return chat.JsonSchemaFormat(json_schema=chat.NamedSchema(**named))
