"""What the parser says: pieces of one answer, in order. `start` and `stop` are token positions in it."""

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
    """A new call; `index` counts from 0. `name` is the bare tool name (`functions.` cut off). `call_id` is
    what the client answers it by; the parser leaves it empty."""

    index: int
    name: str
    call_id: str = ""


class ToolCallArguments(msgspec.Struct, frozen=True, array_like=True):
    """More argument text of call `index`, as written."""

    index: int
    text: str


class MessageEnd(msgspec.Struct, frozen=True, array_like=True):
    """The message that was open has ended; `complete` is False if the stream was cut inside it."""

    complete: bool = True


Delta = ReasoningDelta | TextDelta | ToolCallStart | ToolCallArguments | MessageEnd
