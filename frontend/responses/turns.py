"""Converts response items into turns of a Harmony conversation."""

from collections.abc import Callable, Iterable

from frontend.harmony.conversation import (
    FUNCTIONS,
    AssistantTurn,
    Instructions,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.responses.items import (
    CallItem,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    Item,
    LocalShellCallItem,
    LocalShellOutputItem,
    MessageItem,
    OutputText,
    PatchCallItem,
    PatchOutputItem,
    ReasoningItem,
    ShellCallItem,
    ShellOutputItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
)
from frontend.responses.machine import call_of, result_of
from frontend.turn.thoughts import joined


def turns(items: Iterable[Item], path_of: Callable[[int], str]) -> Iterable[Turn]:
    """The items as turns; `path_of` maps an item's position to the body's field."""
    return joined(_turn(item, path_of(i)) for i, item in enumerate(items))


def _turn(item: Item, path: str) -> Turn:
    """One item as one turn."""
    match item:
        case ReasoningItem():
            return AssistantTurn(reasoning="".join(p.text for p in item.content or item.summary) or None)
        case FunctionCallItem() | CustomCallItem():
            return AssistantTurn(tool_calls=(_call(item),))
        case FunctionOutputItem() | CustomOutputItem():
            return ToolResult(call_id=item.call_id, text=_text(item.output), path=f"{path}.call_id")
        case MessageItem():
            return _message(item)
        case LocalShellCallItem() | ShellCallItem() | PatchCallItem() | ToolSearchCallItem():
            return AssistantTurn(tool_calls=(call_of(item),))
        case LocalShellOutputItem() | ShellOutputItem() | PatchOutputItem() | ToolSearchOutputItem():
            return result_of(item, path)


def _call(item: CallItem) -> ToolCall:
    is_custom = isinstance(item, CustomCallItem)
    return ToolCall(
        call_id=item.call_id,
        name=item.name,
        arguments=item.input if isinstance(item, CustomCallItem) else item.arguments,
        takes_text=is_custom,
        namespace=item.namespace or FUNCTIONS,
    )


def _message(item: MessageItem) -> Turn:
    text = _text(item.content)
    match item.role:
        case "user":
            return UserTurn(text)
        case "assistant":
            is_preamble = item.phase == "commentary"
            return AssistantTurn(preamble=text or None) if is_preamble else AssistantTurn(text=text or None)
        case _:
            return Instructions(text)


def _text(parts: str | Iterable[InputText | OutputText]) -> str:
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)
