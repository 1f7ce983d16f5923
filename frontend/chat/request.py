"""`POST /v1/chat/completions`: from the body to a conversation, its prompt and its answer-to-be."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime

from msgspec import structs

from baton.errors import InvalidRequest
from frontend.chat.answer import ChatAnswer
from frontend.chat.form import form_of, response_schema
from frontend.harmony.conversation import (
    AssistantTurn,
    Conversation,
    Instructions,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.harmony.render import render
from frontend.http.fields import decode
from frontend.http.services import Services
from frontend.schema import (
    AssistantMessage,
    ChatBody,
    Content,
    DeveloperMessage,
    Effort,
    Message,
    Part,
    SystemMessage,
    TemplateArgs,
    ToolMessage,
    UserMessage,
)
from frontend.turn.form import with_form
from frontend.turn.sampling import Asker, sampling_of, token_requests

# Bodies longer than this are rendered in a thread, so that other streams do not wait for them.
LONG_BODY_BYTES = 8192


async def prepare_chat(raw: bytes, asker: Asker, services: Services) -> ChatAnswer:
    """An answer that can be begun. Raises the BatonError that refuses the body."""
    body, unknown = decode(raw, ChatBody)
    check_served(body, services.max_choices)
    form = form_of(body)
    served = services.fleet.served(body.model)
    talk = conversation(body, datetime.now(UTC).date().isoformat())
    if len(raw) > LONG_BODY_BYTES:
        token_ids = await asyncio.to_thread(lambda: served.tokenizer.encode_segments(render(talk)))
    else:
        token_ids = served.tokenizer.encode_segments(render(talk))
    sampling = sampling_of(
        body,
        served,
        num_prompt_tokens=len(token_ids),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    requests = token_requests(
        asker, served, [token_ids], with_form(sampling, form), body.n or 1, priority=body.priority
    )
    offered = frozenset(tool.name for tool in talk.tools)
    return ChatAnswer(body, served, requests, offered, ignored=(*unknown, *not_enforced(body)))


def check_served(body: ChatBody, max_choices: int) -> None:
    """Raises InvalidRequest for values that are valid and not served, and for contradictions."""
    if (body.n or 1) > max_choices:
        raise InvalidRequest(f"`n` is {body.n}; {max_choices} choices can be had at most.", param="n")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream`: true.", param="stream_options")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs`: true.", param="top_logprobs")


def not_enforced(body: ChatBody) -> Iterator[str]:
    """Paths of the fields that are known, and taken as a wish only."""
    if any(message.name is not None for message in body.messages):
        yield "messages[].name"


def conversation(body: ChatBody, current_date: str) -> Conversation:
    """The body as a conversation. `tool_choice` none leaves the tools out of it.

    Raises InvalidRequest, naming the field, for content that is not text, two tools of one name, and tool
    results without a call.
    """
    args = [args for args in (body.chat_template_args, body.chat_template_kwargs) if args is not None]
    identity = next((a.model_identity for a in args if a.model_identity is not None), None)
    talk = Conversation(
        turns=tuple(_turns(body.messages)),
        tools=() if body.tool_choice == "none" else _tools(body),
        reasoning_effort=_effort(body, args),
        current_date=current_date,
        response_schema=response_schema(body),
    )
    return talk if identity is None else structs.replace(talk, model_identity=identity)


def _effort(body: ChatBody, args: list[TemplateArgs]) -> Effort:
    given = [body.reasoning_effort, *(a.reasoning_effort for a in args)]
    return next((effort for effort in given if effort is not None), "medium")


def _tools(body: ChatBody) -> tuple[Tool, ...]:
    seen: set[str] = set()
    for i, tool in enumerate(body.tools or ()):
        if tool.function.name in seen:
            raise InvalidRequest(
                f"Two tools are called {tool.function.name!r}.", param=f"tools[{i}].function.name"
            )
        seen.add(tool.function.name)
    functions = [tool.function for tool in body.tools or ()]
    return tuple(Tool(name=f.name, description=f.description, parameters=f.parameters) for f in functions)


def _turns(messages: list[Message]) -> Iterator[Turn]:
    called: set[str] = set()
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        match message:
            case SystemMessage() | DeveloperMessage():
                yield Instructions(_text(message.content, path))
            case UserMessage():
                yield UserTurn(_text(message.content, path))
            case AssistantMessage():
                called.update(call.id for call in message.tool_calls or ())
                yield _assistant_turn(message, path)
            case ToolMessage():
                if message.tool_call_id not in called:
                    raise InvalidRequest(
                        f"No earlier assistant message has a tool call with id {message.tool_call_id!r}.",
                        param=f"{path}.tool_call_id",
                    )
                yield ToolResult(call_id=message.tool_call_id, text=_text(message.content, path))


def _assistant_turn(message: AssistantMessage, path: str) -> AssistantTurn:
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise InvalidRequest(f"`{path}.{name}` is not served.", param=f"{path}.{name}")
    calls = message.tool_calls or ()
    return AssistantTurn(
        reasoning=message.reasoning_content or message.reasoning or None,
        text=_text(message.content or message.refusal or "", path) or None,
        tool_calls=tuple(
            ToolCall(call_id=c.id, name=c.function.name, arguments=c.function.arguments) for c in calls
        ),
    )


def _text(content: Content, path: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(content))


def _part_text(part: Part, path: str) -> str:
    if part.type not in {"text", "refusal"}:
        raise InvalidRequest(
            f"`{path}.type` {part.type!r} is not served: messages are text.", param=f"{path}.type"
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise InvalidRequest(f"`{path}.{part.type}` is missing.", param=f"{path}.{part.type}")
    return text
