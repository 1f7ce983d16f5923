"""Answers kept for later prompts, as the model wrote them; reasoning that clients carry under a seal."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.errors import InvalidRequest
from frontend.harmony.conversation import (
    AssistantTurn,
    Conversation,
    Kind,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
    WrittenMessage,
    render,
)
from frontend.harmony.parse import HarmonyParser
from frontend.turn import thoughts
from frontend.turn.thoughts import Kept, Seal, Thoughts, joined, written_messages
from tests.scripted_frontend import TOKENIZER

HI = UserTurn("Hi")
THINK = "<|channel|>analysis<|message|>Think.<|end|>"
PYTHON = "<|start|>assistant to=python<|channel|>analysis<|message|>1<|call|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Said.<|return|>"
DEEP = "[" * 5000 + "]" * 5000


def called(*call_ids: str, arguments: str = "{}", takes_text: bool = False, **fields: Any) -> AssistantTurn:
    """A turn with calls of `f`, or of `name`."""
    name = fields.pop("name", "f")
    calls = [
        ToolCall(call_id=each, name=name, arguments=arguments, takes_text=takes_text) for each in call_ids
    ]
    return AssistantTurn(tool_calls=tuple(calls), **fields)


def message(kind: Kind, text: str) -> WrittenMessage:
    call = "functions.f" if kind == "call" else ""
    return WrittenMessage(kind=kind, text=text, token_ids=array("I", [1]), call=call)


def keep(kept: Thoughts, call_id: str, thought: str, owner: str = "") -> None:
    kept.keep(Kept(owner, call_id, (message("thought", thought),) if thought else ()))


def recalled(kept: Thoughts, call_id: str, owner: str = "") -> str | None:
    """The reasoning kept under that id."""
    found = kept.recall(owner, call_id)
    return None if found is None else found.text_of("thought")


def now(*call_ids: str, **fields: Any) -> AssistantTurn:
    return called(*call_ids or ("a",), **{"text": "Now.", **fields})


@pytest.mark.parametrize(
    ("written", "turn", "is_same"),
    [
        ("{}", now(), True),
        ("{}", now(reasoning=""), True),
        ("{}", now(reasoning="One.\n\nTwo."), True),
        ("{}", now(reasoning="One."), False),
        ("", now(), True),
        ("{}", now(text="More."), False),
        ("{}", now(name="g"), False),
        ("{}", now("a", "a"), False),
        ('{"a": 1, "b": 2}', now(arguments='{"b":2,"a":1}'), True),
        ('{"a": 1}', now(arguments='{"a": 1.0}'), False),
        ('{"a": 1}', now(arguments='{"a": true}'), False),
        ('{"a": [1, 2]}', now(arguments='{"a": [2, 1]}'), False),
        ("{", now(arguments="{ "), False),
        (DEEP, now(arguments=DEEP + " "), False),
        ("{", now(arguments='{"arguments":"{"}'), True),
        ('{"input": "x"}', now(arguments="x", takes_text=True), True),
        ('{"input": "x", "more": 1}', now(arguments="x", takes_text=True), False),
        ("x", now(arguments="y", takes_text=True), False),
    ],
)
def test_a_turn_is_the_answer_if_its_content_is_the_same(
    written: str, turn: AssistantTurn, is_same: bool
) -> None:
    kinds: list[tuple[Kind, str]] = [("thought", "One."), ("thought", "Two."), ("text", "Now.")]
    answer = Kept("", "a", tuple(message(*each) for each in [*kinds, ("text", ""), ("call", written)]))
    assert answer.matches(turn) is is_same


def written(text: str) -> tuple[WrittenMessage, ...]:
    parser = HarmonyParser(TOKENIZER.vocabulary, frozenset({"python"}))
    token_ids = TOKENIZER.encode_text(text, allow_special=True)
    parser.feed(token_ids)
    return written_messages(token_ids, parser.messages, TOKENIZER)


def test_an_answer_is_recorded_as_a_history_has_it() -> None:
    *others, said = written(THINK + PYTHON + FINAL)
    assert [(m.kind, m.text, m.call) for m in others] == [("thought", "Think.", ""), ("call", "1", "python")]
    last = TOKENIZER.encode_text(FINAL.replace("<|return|>", "<|end|>"), allow_special=True)
    assert list(said.token_ids) == last


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
def test_an_answer_with_other_tokens_is_not_recorded(text: str) -> None:
    assert written(text) == ()


def test_an_entry_is_shared_once_unless_it_is_too_large_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thoughts, "MAX_BYTES", 80_000)
    there, shared = Thoughts(), list[Kept]()
    here = Thoughts(shared.append)
    for call_id, thought in (("a", "Think."), ("b", "x" * 10_000), ("c", "")):
        keep(here, call_id, thought, "alice")
    for kept in shared:
        there.take(kept)
        here.take(kept)
    assert [kept.call_id for kept in shared] == ["a"]
    assert recalled(there, "a", "alice") == "Think."
    assert (recalled(there, "a", "bob"), here.num_bytes) == (None, there.num_bytes)


@pytest.mark.parametrize(
    ("turns", "restored"),
    [
        ([HI, called("a"), ToolResult(call_id="a", text="ok"), called("b")], ["Think.", None]),
        ([called("b", "a")], ["Think."]),  # in another order
        ([called("a-2", reasoning=""), called("a-1")], ["Think.", None]),  # without the answer's first call
        ([called("a", reasoning="Other."), called("a-1")], ["Other.", None]),
    ],
)
def test_a_call_without_its_reasoning_gets_it(turns: list[Turn], restored: list[str | None]) -> None:
    kept = Thoughts()
    keep(kept, "a", "Think.")
    resumed = kept.resumed("", Conversation(turns=tuple(turns)), "2026-11-21")
    assert [turn.reasoning for turn in resumed.turns if isinstance(turn, AssistantTurn)] == restored


def test_thoughts_are_bounded_in_bytes_and_those_not_used_for_longest_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thoughts, "MAX_BYTES", 40_000)
    kept = Thoughts()
    for i in range(100):
        keep(kept, str(i), "x" * 500)
        assert kept.num_bytes <= 40_000
        assert recalled(kept, "0") is not None, "it is used again and again"
    assert recalled(kept, "1") is None
    assert recalled(kept, "99") is not None
    keep(kept, "large", "x" * 1_000)  # as large as two others
    assert kept.num_bytes <= 40_000
    keep(kept, "too large", "x" * 5_000)
    assert (recalled(kept, "too large"), recalled(kept, "large")) == (None, "x" * 1_000)


CALL_A, CALL_B, OTHER = called("a"), called("a-1"), called("b")
DONE = ToolResult(call_id="a", text="")
BOTH = (*CALL_A.tool_calls, *CALL_B.tool_calls)
THOUGHT, MORE = AssistantTurn(reasoning="Think."), AssistantTurn(reasoning="More.")
A, B = AssistantTurn(text="A."), AssistantTurn(text="B.")
PREAMBLE = AssistantTurn(text="Now.", is_preamble=True)


@pytest.mark.parametrize(
    ("parts", "turns"),
    [
        ([THOUGHT, AssistantTurn(), A, CALL_A, CALL_B],
         [AssistantTurn(reasoning="Think.", text="A.", tool_calls=BOTH)]),
        # What comes again or too late begins a turn.
        ([A, A], [A, A]),
        ([A, B], [A, B]),
        ([A, THOUGHT], [A, THOUGHT]),
        ([A, CALL_A, A], [called("a", text="A."), A]),
        ([CALL_A, A], [CALL_A, A]),
        ([CALL_A, THOUGHT, A, OTHER], [CALL_A, called("b", reasoning="Think.", text="A.")]),
        ([CALL_A, THOUGHT, A, CALL_B], [AssistantTurn(reasoning="Think.", text="A.", tool_calls=BOTH)]),
        ([CALL_A, called("b", text="A.")], [CALL_A, called("b", text="A.")]),
        ([CALL_A, OTHER, DONE], [CALL_A, OTHER, DONE]),
        # Calls with results were run: text after them ends nothing.
        ([CALL_A, MORE, A, B, DONE], [called("a", reasoning="More.", text="A.\n\nB."), DONE]),
        ([CALL_A, A, OTHER, DONE], [CALL_A, called("b", text="A."), DONE]),
        ([called("a", text="A."), THOUGHT, B],
         [called("a", text="A."), AssistantTurn(reasoning="Think.", text="B.")]),
        # The texts before a call are preambles of one answer.
        ([A, B, A, CALL_A], [called("a", text="A.\n\nB.\n\nA.")]),
        ([A, HI, B, CALL_A], [A, HI, called("a", text="B.")]),
        ([AssistantTurn(), HI, A, HI], [HI, A, HI]),
        # An answer may have ended after its preamble.
        ([THOUGHT, PREAMBLE, CALL_A], [called("a", reasoning="Think.", text="Now.")]),
        ([THOUGHT, PREAMBLE, HI, A],
         [AssistantTurn(reasoning="Think.", text="Now.", is_preamble=True), HI, A]),
        ([PREAMBLE, A], [PREAMBLE, A]),
    ],
)  # fmt: skip
def test_the_parts_of_an_answer_are_one_turn(parts: list[Turn], turns: list[Turn]) -> None:
    found = joined(parts)
    assert [replace(turn, parts=()) if isinstance(turn, AssistantTurn) else turn for turn in found] == turns


@pytest.mark.parametrize(
    ("parts", "written"),
    [
        ([THOUGHT, A, MORE, B, CALL_A, CALL_B, DONE], ["Think.", "A.", "More.", "B.", "{}", "{}"]),
        ([THOUGHT, CALL_A, A, MORE, CALL_B, DONE], ["Think.", "{}", "A.", "More.", "{}"]),
        ([THOUGHT, CALL_A, A, MORE, DONE], ["Think.", "A.", "More.", "{}"]),
        ([THOUGHT, MORE, HI], ["Think.", "More."]),
        ([THOUGHT, A, HI], ["A."]),
    ],
)
def test_a_prompt_has_the_parts_of_an_answer_in_their_order(parts: list[Turn], written: list[str]) -> None:
    segments = render(Conversation(turns=tuple(joined([HI, *parts]))))
    assert [each for each in segments if each in {"Think.", "A.", "More.", "B.", "{}"}] == written


@given(st.text())
def test_a_sealed_text_opens_with_its_key(text: str) -> None:
    seal, other = Seal(b"key"), Seal(b"other")
    assert seal.open(seal.close(text), "x") == text
    assert not seal.close(text).startswith("bt1."), "earlier releases would refuse it"
    assert Seal(b"key").is_ours(text, seal.sign(text), "x")
    assert seal.open(other.close(text), "x") is None
    assert not seal.is_ours(text, other.sign(text), "x")


def test_a_signature_of_an_earlier_release_is_valid() -> None:
    assert Seal(b"key").is_ours("Think.", "bt1.7e738dfe.c0900c623836fa5b677222f56b4b74de", "x")


EARLIER = "bt1.7e738dfe.7b2b4a84b5bca75d0f2aed0e38b5c4c8.eJwLycjMy9YDAAf4Ai0="


@pytest.mark.parametrize(
    "foreign", ["", "gAAAAABo", "bt1", "bt1.", "EqQBCkYIARgCKkA=", EARLIER, Seal(b"another").close("Think.")]
)
def test_a_sealed_text_of_another_server_or_release_is_left_out(foreign: str) -> None:
    assert Seal(b"key").open(foreign, "x") is None
    assert Seal().open(foreign, "x") is None


def test_a_changed_text_is_refused() -> None:
    seal = Seal(b"key")
    closed = seal.close("Think.")
    for changed in (closed[:-1], closed + "A", closed.replace("T", "t"), closed.replace(" T", " éT")):
        with pytest.raises(InvalidRequest):
            seal.open(changed, "x")
    signed = seal.sign("Think.")
    for text, signature in (("Think.", signed[:-1]), ("Think.", signed + "é"), ("Other.", signed)):
        with pytest.raises(InvalidRequest):
            seal.is_ours(text, signature, "x")
