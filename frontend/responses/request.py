"""`POST /v1/responses`: what a body and the items before it ask for, in no API's terms."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from baton.errors import InvalidRequest
from frontend.harmony.conversation import AnswerFormat, Conversation, Instructions, Tool
from frontend.responses.body import (
    LOGPROBS,
    FunctionByName,
    FunctionsByName,
    ResponseBody,
    ResponseTool,
    SchemaFormat,
)
from frontend.responses.items import Item
from frontend.responses.turns import turns
from frontend.turn.fields import JsonObjectFormat, effort_of, identity_of
from frontend.turn.form import CallChoice, any_object, by_schema
from frontend.turn.request import TurnRequest


def check_served(body: ResponseBody) -> None:
    """Raises InvalidRequest for contradictions."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream`: true.", param="stream_options")
    if body.background and body.store is False:
        raise InvalidRequest("`background` needs `store`: true.", param="background")
    if not (body.input or body.instructions or body.previous_response_id):
        raise InvalidRequest("`input` is missing.", param="input")


def turn_request(
    body: ResponseBody, history: Sequence[Item], items: Sequence[Item], num_bytes: int
) -> TurnRequest:
    """What the body asks for after `history`; `items` are its `input`, `num_bytes` is the length of both. The
    instructions are those of this body: they are no part of any history."""
    found = turns([*history, *items], _path_after(len(history)))
    leading = () if body.instructions is None else (Instructions(body.instructions),)
    args = (body.chat_template_args, body.chat_template_kwargs)
    talk = Conversation(
        turns=(*leading, *found),
        tools=_tools(body),
        reasoning_effort=effort_of(None if body.reasoning is None else body.reasoning.effort, *args),
        current_date=datetime.now(UTC).date().isoformat(),
        model_identity=identity_of(*args),
        answer_format=_answer_format(body),
    )
    return TurnRequest(
        model=body.model,
        prompt=talk,
        path="input",
        num_bytes=num_bytes,
        sampling=body,
        call_choice=_call_choice(body),
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if gives_logprobs(body) else None,
        max_calls=1 if body.parallel_tool_calls is False else None,
    )


def gives_logprobs(body: ResponseBody) -> bool:
    """Whether the answer's text comes with log probabilities."""
    return LOGPROBS in (body.include or ()) or body.top_logprobs is not None


def _path_after(num_history: int) -> Callable[[int], str]:
    return lambda i: "previous_response_id" if i < num_history else f"input[{i - num_history}]"


def _tools(body: ResponseBody) -> tuple[Tool, ...]:
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ()))
    return () if body.tool_choice == "none" else tools


def _tool(tool: ResponseTool, path: str) -> Tool:
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
    return Tool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=bool(tool.strict),
        path=path,
    )


def _call_choice(body: ResponseBody) -> CallChoice:
    match body.tool_choice:
        case FunctionByName(name=name):
            return CallChoice(must_call=True, names=frozenset({name}))
        case FunctionsByName(mode=mode, tools=tools):
            names = frozenset(tool.name for tool in tools)
            return CallChoice(must_call=mode == "required", names=names)
        case choice:
            return CallChoice(must_call=choice == "required")


def _answer_format(body: ResponseBody) -> AnswerFormat | None:
    match None if body.text is None else body.text.format:
        case JsonObjectFormat():
            return any_object("text.format")
        case SchemaFormat() as named:
            return by_schema(named, "text.format.schema")
        case _:
            return None
