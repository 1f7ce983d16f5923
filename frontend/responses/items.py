"""The items of a response's input and output, as stored and returned."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

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
