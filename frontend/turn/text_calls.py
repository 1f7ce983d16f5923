"""The input of tools that take text, given whole: the model may write it as JSON, like other calls."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from frontend.harmony.deltas import Delta, MessageEnd, ToolCallArguments, ToolCallStart


class _Wrapped(msgspec.Struct, forbid_unknown_fields=True):
    input: str


class TextCalls:
    """Holds back the arguments of calls of these tools until they are complete, then takes them out of a
    JSON object that has nothing but them."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held: list[ToolCallArguments] | None = None

    def pass_on(self, deltas: Sequence[Delta]) -> Iterator[Delta]:
        """What can be told now."""
        for delta in deltas:
            match delta:
                case ToolCallStart() if delta.name in self._names:
                    self._held = []
                case ToolCallArguments() if self._held is not None:
                    self._held.append(delta)
                    continue
                case MessageEnd():
                    yield from self._whole()
            yield delta

    def _whole(self) -> Iterator[Delta]:
        held, self._held = self._held, None
        if held:
            text = "".join(part.text for part in held)
            with suppress(msgspec.DecodeError, RecursionError):  # then it is the input itself
                text = msgspec.json.decode(text, type=_Wrapped).input
            yield replace(held[0], text=text)
