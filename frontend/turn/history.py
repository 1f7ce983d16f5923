"""Merges the history's items into turns as the model wrote them."""

from collections.abc import Iterable, Iterator

from frontend.harmony.conversation import AssistantTurn, Turn
from frontend.turn.written import PARAGRAPH


def joined(parts: Iterable[Turn]) -> Iterator[Turn]:
    """The parts as turns: consecutive assistant parts are merged into one turn per answer, so that they are
    rendered as the model wrote them. Empty assistant parts are dropped."""
    turn = AssistantTurn()
    for part in _with_preambles(list(parts)):
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


def _with_preambles(parts: list[Turn]) -> list[Turn]:
    """The parts. A text whose answer goes on with more text or reasoning, and then a call, is a preamble: it
    would be a final answer, and end the reasoning before it, if it were a turn without that call."""
    calls_follow = is_next = False
    for i, part in reversed(list(enumerate(parts))):
        if not isinstance(part, AssistantTurn) or part.preamble:
            calls_follow = False
        elif part.tool_calls:
            calls_follow = is_next = True
        else:
            if calls_follow and part.text and not is_next:
                parts[i] = AssistantTurn(preamble=part.text)
            is_next = False
    return parts


def _follows(new: AssistantTurn, turn: AssistantTurn) -> bool:
    """Whether `new` continues `turn`, whose order is reasoning, preambles, text, calls. Between preambles
    there may be more reasoning."""
    if new.tool_calls:
        return True
    if new.text or new.preamble or turn.preamble:
        return not (turn.text or turn.tool_calls)
    return turn == AssistantTurn()


def _both(turn: AssistantTurn, new: AssistantTurn) -> AssistantTurn:
    return AssistantTurn(
        reasoning=_paragraphs(turn.reasoning, new.reasoning),
        preamble=_paragraphs(turn.preamble, new.preamble),
        text=turn.text or new.text,
        tool_calls=turn.tool_calls + new.tool_calls,
    )


def _paragraphs(*texts: str | None) -> str | None:
    return PARAGRAPH.join(filter(None, texts)) or None
