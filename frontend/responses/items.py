"""The items of a response's input and output, as stored and returned."""

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from baton.errors import BatonError
from frontend.harmony.conversation import ReasoningEffort as Effort
from frontend.responses.body import ResponseBody, ResponseTool, Summary
from frontend.text.served import ContextTooLong
from frontend.turn.ids import new_id
from frontend.turn.logprobs import ContentLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Phase = Literal["commentary", "final_answer"]


class InputText(msgspec.Struct, kw_only=True, tag_field="type", tag="input_text"):
    """Text that the client wrote."""

    text: str


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text that the model wrote; `annotations` is always empty."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Reasoning text."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message. `phase` distinguishes the model's preambles from its answer."""

    id: str
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus
    content: list[InputText | OutputText]
    phase: Phase | msgspec.UnsetType = msgspec.UNSET


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    """Reasoning text as a summary; it is the full text."""

    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning: in `content`, or in `summary` if requested; `encrypted_content` carries it to stateless
    clients."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET
    status: ItemStatus


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A function call that the model requests; `arguments` is the text that it wrote."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A custom tool call that the model requests; `input` is the text that it wrote."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call_output"):
    """The result of a custom tool call."""

    id: str
    call_id: str
    output: str | list[InputText]
    status: ItemStatus


class FunctionOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """The result of a function call."""

    id: str
    call_id: str
    output: str | list[InputText]
    status: ItemStatus


class LocalShellAction(msgspec.Struct, kw_only=True):
    """One command with its arguments."""

    command: list[str]
    type: Literal["exec"] = "exec"
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class ShellAction(msgspec.Struct, kw_only=True):
    """Shell commands that run one after the other."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class PatchOperation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The change to one file."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class LocalShellCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell_call"):
    """A call of `local_shell`."""

    call_id: str
    action: LocalShellAction
    id: str = ""
    status: ItemStatus = "completed"


class ShellCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="shell_call"):
    """A call of `shell`."""

    call_id: str
    action: ShellAction
    id: str = ""
    status: ItemStatus = "completed"


class PatchCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch_call"):
    """A call of `apply_patch`."""

    call_id: str
    operation: PatchOperation
    id: str = ""
    status: ItemStatus = "completed"


class LocalShellOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell_call_output"):
    """The output of a command. `id` is that of the call; some clients send `call_id` instead."""

    output: str
    id: str = ""
    call_id: str | None = None


class ShellOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="shell_call_output"):
    """The output and outcome of each command."""

    call_id: str
    output: str | list[dict[str, Any]]
    id: str = ""


class PatchOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch_call_output"):
    """Whether a patch was applied, and its log."""

    call_id: str
    status: str = "completed"
    output: str | None = None
    id: str = ""


class ToolSearchCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search_call"):
    """A call of a `tool_search` that the client runs."""

    call_id: str
    arguments: dict[str, Any]
    execution: Literal["client"] = "client"
    id: str = ""
    status: ItemStatus = "completed"


class ToolSearchOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search_output"):
    """The tools that a search has found, which the model may call from then on."""

    call_id: str
    tools: list[dict[str, Any]]
    execution: Literal["client"] = "client"
    id: str = ""
    status: ItemStatus = "completed"


MachineCallItem = LocalShellCallItem | ShellCallItem | PatchCallItem | ToolSearchCallItem
MachineOutputItem = LocalShellOutputItem | ShellOutputItem | PatchOutputItem | ToolSearchOutputItem
MACHINE_ITEMS: Mapping[str, type[msgspec.Struct]] = {
    "local_shell_call": LocalShellCallItem,
    "shell_call": ShellCallItem,
    "apply_patch_call": PatchCallItem,
    "local_shell_call_output": LocalShellOutputItem,
    "shell_call_output": ShellOutputItem,
    "apply_patch_call_output": PatchOutputItem,
    "tool_search_call": ToolSearchCallItem,
    "tool_search_output": ToolSearchOutputItem,
}

CallItem = FunctionCallItem | CustomCallItem
WrittenItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem
OutputItem = WrittenItem | MachineCallItem
Item = OutputItem | FunctionOutputItem | CustomOutputItem | MachineOutputItem


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
