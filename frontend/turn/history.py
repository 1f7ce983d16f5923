"""What was said earlier, put together into turns as the model wrote them."""

from collections.abc import Iterable, Iterator

from frontend.harmony.conversation import AssistantTurn, Turn


def joined(parts: Iterable[Turn]) -> Iterator[Turn]:
    """The parts as turns: what the model said between two things that others said becomes one turn for each
    thought, so that it is rendered as it was written. Empty parts of the model's are left out."""
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
    """Whether `new` may be said in the same turn: a turn is thought, preamble, text, calls, in this order."""
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
