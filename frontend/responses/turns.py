"""Items of responses as turns of a Harmony conversation."""

from collections.abc import Callable, Iterable, Iterator

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


def turns(items: Iterable[Item], path_of: Callable[[int], str]) -> Iterator[Turn]:
    """The items as turns of a conversation; `path_of` names the body's field of an item, by position.

    What the model said between two things that others said is one turn for each thought, so that it is
    rendered as it was written.
    """
    turn = AssistantTurn()
    for i, item in enumerate(items):
        spoken = _spoken(item)
        if spoken == AssistantTurn():
            continue
        if spoken is not None and _follows(spoken, turn):
            turn = _joined(turn, spoken)
            continue
        if turn != AssistantTurn():
            yield turn
        turn = spoken or AssistantTurn()
        if isinstance(item, FunctionOutputItem):
            yield ToolResult(
                call_id=item.call_id, text=_joined_text(item.output), path=f"{path_of(i)}.call_id"
            )
        elif isinstance(item, MessageItem) and item.role != "assistant":
            text = _joined_text(item.content)
            yield UserTurn(text) if item.role == "user" else Instructions(text)
    if turn != AssistantTurn():
        yield turn


def _spoken(item: Item) -> AssistantTurn | None:
    """An item of the model's as a turn of its own."""
    match item:
        case ReasoningItem():
            return AssistantTurn(reasoning="".join(part.text for part in item.content) or None)
        case FunctionCallItem():
            call = ToolCall(call_id=item.call_id, name=item.name, arguments=item.arguments)
            return AssistantTurn(tool_calls=(call,))
        case MessageItem(role="assistant"):
            text = _joined_text(item.content) or None
            is_preamble = item.phase == "commentary"
            return AssistantTurn(preamble=text) if is_preamble else AssistantTurn(text=text)
        case _:
            return None


def _follows(new: AssistantTurn, turn: AssistantTurn) -> bool:
    """Whether `new` may be said in the same turn: a turn is thought, preamble, text, calls, in this order."""
    if new.tool_calls:
        return True
    if new.text:
        return not (turn.text or turn.tool_calls)
    if new.preamble:
        return not (turn.preamble or turn.text or turn.tool_calls)
    return turn == AssistantTurn()


def _joined(turn: AssistantTurn, new: AssistantTurn) -> AssistantTurn:
    return AssistantTurn(
        reasoning=turn.reasoning or new.reasoning,
        preamble=turn.preamble or new.preamble,
        text=turn.text or new.text,
        tool_calls=turn.tool_calls + new.tool_calls,
    )


def _joined_text(parts: str | Iterable[InputText | OutputText]) -> str:
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)
