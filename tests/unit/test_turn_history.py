"""The history's items become the turns that the model wrote."""

from frontend.harmony.conversation import AssistantTurn, ToolCall, UserTurn
from frontend.turn.thoughts import joined

A, B = (ToolCall(call_id=name, name=name, arguments="{}") for name in "ab")


def test_what_belongs_together_is_one_turn() -> None:
    parts = [
        AssistantTurn(reasoning="Think."),
        AssistantTurn(),
        AssistantTurn(preamble="Now."),
        AssistantTurn(text="Said."),
        AssistantTurn(tool_calls=(A,)),
        AssistantTurn(tool_calls=(B,)),
    ]
    whole = AssistantTurn(reasoning="Think.", preamble="Now.", text="Said.", tool_calls=(A, B))
    assert list(joined(parts)) == [whole]


def test_what_comes_again_or_too_late_begins_a_turn() -> None:
    said, called = AssistantTurn(text="Said."), AssistantTurn(tool_calls=(A,))
    thought, preamble = AssistantTurn(reasoning="Think."), AssistantTurn(preamble="Now.")
    both = AssistantTurn(text="Said.", tool_calls=(A,))
    assert list(joined([said, said])) == [said, said]
    assert list(joined([said, thought])) == [said, thought]
    assert list(joined([said, preamble])) == [said, preamble]
    assert list(joined([said, called, said])) == [both, said]
    assert list(joined([called, preamble])) == [called, preamble]
    assert list(joined([called, said])) == [called, said]
    assert list(joined([said, AssistantTurn(text="More.")])) == [said, AssistantTurn(text="More.")]


def test_the_texts_before_a_call_are_preambles_and_one_answer() -> None:
    a, b, called = AssistantTurn(text="A."), AssistantTurn(text="B."), AssistantTurn(tool_calls=(A,))
    preamble, thought = AssistantTurn(preamble="Now."), AssistantTurn(reasoning="Think.")
    more = AssistantTurn(reasoning="More.")
    assert list(joined([a, b, called])) == [AssistantTurn(preamble="A.", text="B.", tool_calls=(A,))]
    three = AssistantTurn(preamble="A.\n\nB.", text="A.", tool_calls=(A,))
    assert list(joined([a, b, a, called])) == [three]
    assert list(joined([preamble, preamble])) == [AssistantTurn(preamble="Now.\n\nNow.")]
    whole = AssistantTurn(reasoning="Think.\n\nMore.", preamble="A.", text="B.", tool_calls=(A,))
    assert list(joined([thought, a, more, b, called])) == [whole]
    assert list(joined([thought, a, more, called])) == [
        AssistantTurn(reasoning="Think.\n\nMore.", preamble="A.", tool_calls=(A,))
    ]
    own = AssistantTurn(text="B.", tool_calls=(A,))
    assert list(joined([a, UserTurn("Hi"), b, called])) == [a, UserTurn("Hi"), own]
    told = AssistantTurn(preamble="Now.", tool_calls=(A,))
    assert list(joined([a, preamble, called])) == [a, told]  # a final answer, and the next answer


def test_a_user_comes_between_turns() -> None:
    hi, said = UserTurn("Hi"), AssistantTurn(text="Said.")
    assert list(joined([AssistantTurn(), hi, said, hi])) == [hi, said, hi]
