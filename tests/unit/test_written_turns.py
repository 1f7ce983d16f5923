"""Which answers are recorded as the model wrote them, and which turns of a history are taken for them."""

from array import array

import pytest

from frontend.harmony.conversation import (
    AssistantTurn,
    Conversation,
    Kind,
    ToolCall,
    UserTurn,
    WrittenMessage,
)
from frontend.harmony.parse import HarmonyParser
from frontend.harmony.render import render
from frontend.text.tokenizer import TooManyTokens
from frontend.turn.prepare import encoded
from frontend.turn.thoughts import WrittenTurn, written_turn
from tests.scripted_frontend import TOKENIZER

THINK = "<|channel|>analysis<|message|>Think.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Said.<|return|>"
DEEP = "[" * 5000 + "]" * 5000


def message(kind: Kind, text: str) -> WrittenMessage:
    return WrittenMessage(
        kind=kind, text=text, token_ids=array("I", [1]), is_first=False, call="f" if kind == "call" else None
    )


def call(arguments: str = "{}", name: str = "f", *, takes_text: bool = False) -> ToolCall:
    return ToolCall(call_id="a", name=name, arguments=arguments, takes_text=takes_text)


def calling(arguments: str) -> WrittenTurn:
    thoughts = [message("thought", "One."), message("thought", "Two.")]
    said = [message("text", "Now."), message("call", arguments)]
    return WrittenTurn(messages=(*thoughts, *said))


@pytest.mark.parametrize(
    ("turn", "is_same"),
    [
        (AssistantTurn(preamble="Now.", tool_calls=(call(),)), True),
        (AssistantTurn(preamble="Now.", tool_calls=(call(),), reasoning=""), True),
        (AssistantTurn(preamble="Now.", tool_calls=(call(),), reasoning="One.Two."), True),
        (AssistantTurn(preamble="Now.", tool_calls=(call(),), reasoning="One.\n\nTwo."), True),
        (AssistantTurn(preamble="Now.", tool_calls=(call(),), reasoning="One."), False),
        (AssistantTurn(preamble="Then.", tool_calls=(call(),)), False),
        (AssistantTurn(tool_calls=(call(),)), False),
        (AssistantTurn(preamble="Now.", text="More.", tool_calls=(call(),)), False),
        (AssistantTurn(preamble="Now.", tool_calls=(call(name="g"),)), False),
        (AssistantTurn(preamble="Now.", tool_calls=(call(), call())), False),
        (AssistantTurn(preamble="Now."), False),
    ],
)
def test_a_turn_is_the_answer_if_all_that_the_client_tells_is_the_same(
    turn: AssistantTurn, is_same: bool
) -> None:
    assert calling("{}").matches(turn) is is_same


def test_the_thoughts_before_a_final_answer_are_not_compared() -> None:
    final = WrittenTurn(messages=(message("thought", "One."), message("text", "Said.")))
    assert final.matches(AssistantTurn(text="Said.", reasoning="Other."))
    assert not final.matches(AssistantTurn(text="Other."))


@pytest.mark.parametrize(
    ("written", "told", "takes_text", "is_same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', False, True),
        ('{"a": 1}', '{"a": 1.0}', False, False),
        ('{"a": 1}', '{"a": true}', False, False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False, False),
        ("{", "{ ", False, False),
        (DEEP, DEEP + " ", False, False),
        ("{", "{", False, True),
        ('{"input": "x"}', "x", True, True),
        ('{"input": "x", "more": 1}', "x", True, False),
        ("x", "y", True, False),
    ],
)
def test_a_call_is_the_same_if_its_arguments_say_the_same(
    written: str, told: str, takes_text: bool, is_same: bool
) -> None:
    turn = AssistantTurn(preamble="Now.", tool_calls=(call(told, takes_text=takes_text),))
    assert calling(written).matches(turn) is is_same


def written(text: str) -> WrittenTurn | None:
    parser = HarmonyParser(TOKENIZER.vocabulary, frozenset())
    token_ids = TOKENIZER.encode_text(text, allow_special=True)
    parser.feed(token_ids)
    return written_turn(token_ids, parser.messages, TOKENIZER)


def test_an_answer_is_recorded_as_a_history_has_it() -> None:
    turn = written(THINK + FINAL)
    assert turn is not None
    assert [(m.kind, m.text, m.is_first) for m in turn.messages] == [
        ("thought", "Think.", True),
        ("text", "Said.", False),
    ]
    last = TOKENIZER.encode_text(FINAL.replace("<|return|>", "<|end|>"), allow_special=True)
    assert list(turn.messages[1].token_ids) == last


@pytest.mark.parametrize(
    "text",
    [
        "",
        THINK + FINAL.removesuffix("<|return|>"),
        THINK + FINAL.replace("<|return|>", "<|endoftext|>"),
        THINK + "<|end|>" + FINAL,
        THINK + FINAL.removeprefix("<|start|>assistant"),
        THINK + "<|start|>assistant<|channel|>final<|end|>",
    ],
)
def test_an_answer_that_was_not_read_as_it_is_written_is_not_recorded(text: str) -> None:
    assert written(text) is None


@pytest.mark.parametrize("texts", [("x" * 300,), ("Hi",) * 30])
def test_a_prompt_may_have_exactly_its_limit(texts: tuple[str, ...]) -> None:
    segments = list(render(Conversation(turns=tuple(UserTurn(text) for text in texts))))
    num = len(encoded(segments, TOKENIZER, 10_000).token_ids)
    assert len(encoded(segments, TOKENIZER, num).token_ids) == num
    with pytest.raises(TooManyTokens):
        encoded(segments, TOKENIZER, num - 1)


def test_the_opening_ends_at_the_first_answer() -> None:
    first, second = AssistantTurn(text="One."), AssistantTurn(text="Two.")
    opening = (UserTurn("assistant"),)
    talk = (*opening, first, UserTurn("Hi"), second, UserTurn("Hi"))
    made = encoded(render(Conversation(turns=talk)), TOKENIZER, 10_000)
    start = TOKENIZER.encode_text("<|start|>assistant", allow_special=True)
    alone = encoded(render(Conversation(turns=opening)), TOKENIZER, 10_000).token_ids
    assert made.num_opening_tokens == len(alone) - len(start)
