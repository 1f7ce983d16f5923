"""Merges the history's items into turns as the model wrote them."""

from collections.abc import Iterable, Iterator

from frontend.harmony.conversation import AssistantTurn, Turn


def joined(parts: Iterable[Turn]) -> Iterator[Turn]:
    """The parts as turns: consecutive assistant parts are merged into one turn per reasoning block, so that
    they are rendered as the model wrote them. Empty assistant parts are dropped."""
    turn = AssistantTurn()
    for part in parts:
        if part == AssistantTurn():
            continue
        if isinstance(part, AssistantTurn) and _follows(part, turn):
            turn = _both(turn, part)
            continue
        if turn != AssistantTurn():
            yield turn
        turn = part if isinstance(part, AssistantTurn) else AssistantTurn()
        if not isinstance(part, AssistantTurn):
            yield part
    if turn != AssistantTurn():
        yield turn


def _follows(new: AssistantTurn, turn: AssistantTurn) -> bool:
    """Whether `new` continues `turn`, whose order is reasoning, preamble, text, calls."""
    if new.tool_calls:
        return True
    if new.text:
        return not (turn.text or turn.tool_calls)
    if new.preamble:
        return not (turn.preamble or turn.text or turn.tool_calls)
    return turn == AssistantTurn()


def _both(turn: AssistantTurn, new: AssistantTurn) -> AssistantTurn:
    return AssistantTurn(
        reasoning=turn.reasoning or new.reasoning,
        preamble=turn.preamble or new.preamble,
        text=turn.text or new.text,
        tool_calls=turn.tool_calls + new.tool_calls,
    )
