"""The parser's output: deltas of one answer, in order. `start` and `stop` are token positions in it."""

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True, array_like=True):
    """Text of the analysis channel."""

    text: str
    start: int
    stop: int


class TextDelta(msgspec.Struct, frozen=True, array_like=True):
    """Text for the user: the final channel, or a preamble (commentary without recipient)."""

    text: str
    start: int
    stop: int
    preamble: bool = False


class ToolCallStart(msgspec.Struct, frozen=True, array_like=True):
    """The start of a call; `index` counts from 0. `name` is the tool name without `functions.`. `call_id`,
    which the result refers to, is left empty by the parser."""

    index: int
    name: str
    call_id: str = ""


class ToolCallArguments(msgspec.Struct, frozen=True, array_like=True):
    """More argument text of call `index`, verbatim."""

    index: int
    text: str


class MessageEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of the open message; `complete` is False if the stream ended inside it."""

    complete: bool = True


Delta = ReasoningDelta | TextDelta | ToolCallStart | ToolCallArguments | MessageEnd
