"""The items of a response's input and output, in the one shape in which they are kept and given."""

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
    """Text that the model wrote; there are never annotations."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """A thought, as it was thought."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What somebody said. `phase` tells a model's preambles from its answer."""

    id: str
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus
    content: list[InputText | OutputText]
    phase: Phase | msgspec.UnsetType = msgspec.UNSET


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    """A thought, given as its summary: it is whole."""

    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """A chain of thought: as `content`, or as `summary` where that is asked for, and sealed in one word."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET
    status: ItemStatus


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model asks for; `arguments` is the text that it wrote."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool; `input` is the text that the model wrote."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call_output"):
    """What a custom tool returned."""

    id: str
    call_id: str
    output: str | list[InputText]
    status: ItemStatus


class FunctionOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """What a function returned."""

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
    """Lines for a shell, one after the other."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class PatchOperation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is done to one file."""

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
    """What a command printed. OpenAI's `id` is that of the call; some clients send `call_id`."""

    output: str
    id: str = ""
    call_id: str | None = None


class ShellOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="shell_call_output"):
    """What each line printed, and how it ended."""

    call_id: str
    output: str | list[dict[str, Any]]
    id: str = ""


class PatchOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch_call_output"):
    """Whether a patch was applied, and what was said to it."""

    call_id: str
    status: str = "completed"
    output: str | None = None
    id: str = ""


MachineCallItem = LocalShellCallItem | ShellCallItem | PatchCallItem
MachineOutputItem = LocalShellOutputItem | ShellOutputItem | PatchOutputItem
MACHINE_ITEMS: Mapping[str, type[msgspec.Struct]] = {
    "local_shell_call": LocalShellCallItem,
    "shell_call": ShellCallItem,
    "apply_patch_call": PatchCallItem,
    "local_shell_call_output": LocalShellOutputItem,
    "shell_call_output": ShellOutputItem,
    "apply_patch_call_output": PatchOutputItem,
}

CallItem = FunctionCallItem | CustomCallItem
WrittenItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem
OutputItem = WrittenItem | MachineCallItem
Item = OutputItem | FunctionOutputItem | CustomOutputItem | MachineOutputItem
