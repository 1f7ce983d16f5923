"""The items of responses as turns of a Harmony conversation."""

from collections.abc import Callable, Iterable

from frontend.harmony.conversation import (
    AssistantTurn,
    Instructions,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.responses.items import (
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from frontend.turn.history import joined


def turns(items: Iterable[Item], path_of: Callable[[int], str]) -> Iterable[Turn]:
    """The items as turns of a conversation; `path_of` names the body's field of an item, by position."""
    return joined(_turn(item, path_of(i)) for i, item in enumerate(items))


def _turn(item: Item, path: str) -> Turn:
    """An item as a turn of its own."""
    match item:
        case ReasoningItem():
            return AssistantTurn(reasoning="".join(part.text for part in item.content) or None)
        case FunctionCallItem():
            call = ToolCall(call_id=item.call_id, name=item.name, arguments=item.arguments)
            return AssistantTurn(tool_calls=(call,))
        case FunctionOutputItem():
            return ToolResult(call_id=item.call_id, text=_text(item.output), path=f"{path}.call_id")
        case MessageItem():
            return _message(item)


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
