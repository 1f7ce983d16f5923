"""The Responses API's response bodies."""

import time
from typing import Any, Literal

import msgspec

from baton.errors import BatonError
from frontend.harmony.conversation import ReasoningEffort as Effort
from frontend.responses.body import ResponseBody, ResponseTool, Summary
from frontend.responses.items import Item, OutputItem
from frontend.text.served import ContextTooLong
from frontend.turn.ids import new_id

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
RUNNING: ResponseStatus = "in_progress"


class ResponseError(msgspec.Struct, kw_only=True):
    """Why a response failed; `code` is one of OpenAI's."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt", "context_length_exceeded"]
    message: str

    @classmethod
    def of(cls, error: BatonError) -> "ResponseError":
        """The error under OpenAI's code."""
        if error.status == 429:
            return cls(code="rate_limit_exceeded", message=error.message)
        if isinstance(error, ContextTooLong):
            return cls(code="context_length_exceeded", message=error.message)
        is_theirs = 400 <= error.status < 500
        return cls(code="invalid_prompt" if is_theirs else "server_error", message=error.message)


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputDetails(msgspec.Struct, kw_only=True):
    """Breakdown of the input tokens; `cached_tokens` were found in the KV cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """Breakdown of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class InputTokens(msgspec.Struct, kw_only=True):
    """The response of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ReasoningBody(msgspec.Struct, kw_only=True):
    """The effort that was used, and the requested summary."""

    effort: Effort
    summary: Summary | None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """`POST /v1/responses` and `GET /v1/responses/{id}`. Times are seconds since 1970."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus = RUNNING
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningBody
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


def begun(body: ResponseBody, effort: Effort) -> ResponseObject:
    """The initial response to a body."""
    text_format = {"type": "text"} if body.text is None or body.text.format is None else body.text.format
    return ResponseObject(
        id=new_id("resp"),
        created_at=int(time.time()),
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningBody(effort=effort, summary=summary_of(body)),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text={"format": text_format, "verbosity": "medium"},
        tool_choice=body.tool_choice or "auto",
        tools=[_shown(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
    )


def _shown(tool: ResponseTool) -> dict[str, Any]:
    """The tool as the body gave it; functions have all fields that the SDK's types require."""
    given: dict[str, Any] = msgspec.to_builtins(tool)
    required = ("name", "description", "parameters", "strict") if tool.type == "function" else ()
    return {name: value for name, value in given.items() if value is not None or name in required}


def summary_of(body: ResponseBody) -> Summary | None:
    """The requested reasoning summary."""
    reasoning = body.reasoning
    return None if reasoning is None else reasoning.summary or reasoning.generate_summary


class ItemList(msgspec.Struct, kw_only=True):
    """`GET /v1/responses/{id}/input_items`: one page."""

    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool
    object: Literal["list"] = "list"


class DeletedResponse(msgspec.Struct, kw_only=True):
    """`DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
