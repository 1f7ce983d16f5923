"""Unwraps the input of custom tools, which the model may write as JSON like that of functions."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from frontend.harmony.deltas import Delta, MessageEnd, ToolCallArguments, ToolCallStart


class _Wrapped(msgspec.Struct, forbid_unknown_fields=True):
    input: str


class TextCalls:
    """Holds back the arguments of these tools' calls until they are complete; `{"input": TEXT}` becomes
    TEXT."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held: list[ToolCallArguments] | None = None

    def pass_on(self, deltas: Sequence[Delta]) -> Iterator[Delta]:
        """The deltas that can be sent now."""
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
            with suppress(msgspec.DecodeError):  # not wrapped: the text itself is the input
                text = msgspec.json.decode(text, type=_Wrapped).input
            yield replace(held[0], text=text)
