"""A conversation as token requests: what is remembered of its answers and for whom, its date, its length."""

import asyncio
from typing import Any

import pytest

from baton.messages import TokenChunk
from frontend.harmony.conversation import (
    AssistantTurn,
    Conversation,
    Delta,
    TextGrammar,
    Tool,
    ToolCall,
    ToolCallArguments,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.text.served import ContextTooLong, ServedModel
from frontend.turn.choice import Choice
from frontend.turn.fields import CommonFields
from frontend.turn.prepare import prepare
from frontend.turn.request import Client, RawPrompts, TurnRequest
from frontend.turn.thoughts import Thoughts
from tests.scripted_frontend import TOKENIZER

THINK = "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
FINAL = "<|channel|>final<|message|>Said.<|return|>"
HI = UserTurn("Hi")


def prepared(
    turns: tuple[Turn, ...] = (HI,),
    thoughts: Thoughts | None = None,
    owner: str = "key",
    tools: tuple[Tool, ...] = (Tool(name="f"),),
    context_length: int = 1000,
    *,
    user: str | None = None,
    **more: Any,
) -> Choice:
    request = TurnRequest.of(
        CommonFields(model="alias", user=user),
        Conversation(turns=turns, tools=tools),
        path="messages",
        num_bytes=1,
        **more,
    )
    served = ServedModel("m", context_length, TOKENIZER, "2026-11-21")
    client = Client(request_id="r", deadline_s=7.0, owner=owner, address="10.0.0.1")
    kept = Thoughts() if thoughts is None else thoughts
    (choice,) = asyncio.run(prepare(request, client, served, kept, lambda *_: None, max_choices=4))
    return choice


def fed(choice: Choice, text: str, reason: Any = "stop") -> list[Delta]:
    ids = TOKENIZER.encode_text(text, allow_special=True)
    return [*choice.feed(TokenChunk(tuple(ids), reason)), *choice.finish()]


def prompt_of(choice: Choice) -> str:
    return TOKENIZER.decode(choice.request.token_ids)


@pytest.mark.parametrize(("reason", "is_written"), [("stop", True), ("length", False)])
def test_what_was_thought_before_a_call_is_restored_for_its_owner_only(reason: str, is_written: bool) -> None:
    thoughts = Thoughts()
    choice = prepared(thoughts=thoughts)
    fed(choice, THINK + CALL, reason)
    (call_id,) = choice.call_ids
    again: tuple[Turn, ...] = (
        HI,
        AssistantTurn(tool_calls=(ToolCall(call_id=call_id, name="f", arguments="{}"),)),
        ToolResult(call_id=call_id, text="ok"),
    )
    later = prepared(again, thoughts)
    assert "Let me think." in prompt_of(later)
    assert bool(later.history["written"]) is is_written
    for other in ("", "other"):
        assert "Let me think." not in prompt_of(prepared(again, thoughts, other))


def test_a_conversation_of_more_than_two_contexts_is_not_tokenised_to_its_end() -> None:
    with pytest.raises(ContextTooLong, match="`messages` has more than 200 tokens"):
        prepared((UserTurn("x y " * 5000),), context_length=100)


def test_who_asks_takes_turns_by_key_and_user() -> None:
    assert prepared(user="ann").caller == "key ann"
    assert prepared(owner="").caller == "10.0.0.1"


@pytest.mark.parametrize(("grammar", "given"), [(None, "a"), ("start: /.+/", '{"input": "a"}')])
def test_an_input_is_unwrapped_unless_a_grammar_says_what_it_is(grammar: str | None, given: str) -> None:
    form = None if grammar is None else TextGrammar(syntax="lark", text=grammar, path="tools[0]")
    choice = prepared(tools=(Tool(name="f", takes_text=True, grammar=form),))
    call = '<|channel|>commentary to=functions.f code<|message|>{"input": "a"}<|call|>'
    deltas = fed(choice, THINK + call)
    assert "".join(delta.text for delta in deltas if isinstance(delta, ToolCallArguments)) == given


async def test_the_answers_to_raw_prompts_leave_no_history() -> None:
    raw = RawPrompts(("x",))
    request = TurnRequest.of(CommonFields(model="m"), raw, path="prompt", num_bytes=1)
    served = ServedModel("m", 100, TOKENIZER, "2026-11-21")
    client, thoughts = Client(request_id="r", deadline_s=7.0), Thoughts()
    (choice,) = await prepare(request, client, served, thoughts, lambda *_: None, max_choices=1)
    fed(choice, "plain")
    assert thoughts.num_bytes == 0
