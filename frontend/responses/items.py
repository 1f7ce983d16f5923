"""The items of a response's input and output, in the one shape in which they are kept and given."""

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


CallItem = FunctionCallItem | CustomCallItem
OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem
Item = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | FunctionOutputItem | CustomOutputItem
