"""Thoughts that go round between a call and its result: remembered, or carried by the client under a seal."""

import base64
import zlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.harmony.conversation import (
    AssistantTurn,
    Kind,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
    WrittenMessage,
)
from frontend.turn.seal import Changed, Seal
from frontend.turn.thoughts import Kept, Thoughts, WrittenTurn


def called(*call_ids: str, reasoning: str | None = None) -> AssistantTurn:
    calls = tuple(ToolCall(call_id=i, name="f", arguments="{}") for i in call_ids)
    return AssistantTurn(reasoning=reasoning, tool_calls=calls)


def result(call_id: str) -> ToolResult:
    return ToolResult(call_id=call_id, text="ok")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def written(kind: Kind, text: str) -> WrittenMessage:
    return WrittenMessage(
        kind=kind, text=text, token_ids=array("I", [1]), is_first=False, call="f" if kind == "call" else None
    )


def reasonings(turns: tuple[Turn, ...]) -> list[str | None]:
    return [turn.reasoning for turn in turns if isinstance(turn, AssistantTurn)]


def test_a_thought_that_is_kept_is_shared_once() -> None:
    there = Thoughts()
    shared: list[Kept] = []
    here = Thoughts(share=shared.append, max_bytes=80_000)
    here.keep("alice", ["a"], "Think.")
    here.keep("alice", ["b"], "x" * 10_000)  # too long to be kept
    for kept in shared:
        there.take(kept)
        here.take(kept)
    assert [kept.ids for kept in shared] == [("a",)]
    assert there.recall("alice", "a") == "Think."


@pytest.mark.parametrize(
    ("turns", "restored"),
    [
        ([UserTurn("Hi"), called("a"), result("a")], ["Think."]),
        ([called("a", reasoning="")], ["Think."]),
        ([called("a", reasoning="Other.")], ["Other."]),
        ([called("a"), result("a"), called("b"), result("b")], ["Think.", None]),  # of one answer
    ],
)
def test_a_call_without_its_reasoning_gets_it(turns: list[Turn], restored: list[str | None]) -> None:
    thoughts = Thoughts()
    thoughts.keep("", ["a", "b"], "Think.")
    assert reasonings(thoughts.completed("", turns)) == restored


def test_thoughts_are_bounded_in_bytes_and_those_not_used_for_longest_go() -> None:
    thoughts = Thoughts(max_bytes=40_000)
    for i in range(100):
        thoughts.keep("", [str(i)], "x" * 500)
        assert thoughts.num_bytes <= 40_000
        assert thoughts.recall("", "0") is not None, "it is used again and again"
    assert thoughts.recall("", "1") is None
    assert thoughts.recall("", "99") is not None
    thoughts.keep("", ["large"], "x" * 1_100)  # as large as two others
    assert thoughts.num_bytes <= 40_000
    thoughts.keep("", ["too large"], "x" * 5_000)
    assert (thoughts.recall("", "too large"), thoughts.recall("", "large")) == (None, "x" * 1_100)


def test_no_thought_is_not_kept() -> None:
    shared: list[Kept] = []
    thoughts = Thoughts(share=shared.append)
    thoughts.keep("", ["a"], "")
    thoughts.keep_turn("", [], WrittenTurn(messages=(written("thought", "Think."),)))
    assert (thoughts.num_bytes, shared) == (0, [])


def test_a_call_that_came_back_changed_is_not_as_it_was_written() -> None:
    thoughts = Thoughts()
    turn = WrittenTurn(messages=(written("thought", "Think."), written("call", "{}")))
    thoughts.keep_turn("", ["a"], turn)
    (same,) = thoughts.completed("", [called("a")])
    assert isinstance(same, AssistantTurn)
    assert [message.text for message in same.written] == ["Think.", "{}"]
    changed = AssistantTurn(tool_calls=(ToolCall(call_id="a", name="f", arguments='{"b": 1}'),))
    (other,) = thoughts.completed("", [changed])
    assert isinstance(other, AssistantTurn)
    assert (other.written, other.reasoning) == ((), "Think.")


def test_any_text_can_be_an_answer() -> None:
    thoughts = Thoughts()
    thoughts.keep_turn("", [], WrittenTurn(messages=(written("text", "\ud800"),)))
    (turn,) = thoughts.completed("", [AssistantTurn(text="\ud800")])
    assert isinstance(turn, AssistantTurn)
    assert turn.written


def test_a_thought_is_forgotten_when_it_is_too_old() -> None:
    clock = Clock()
    thoughts = Thoughts(max_age_s=10, clock=clock)
    thoughts.keep("", ["a"], "Think.")
    clock.now_s = 9
    assert thoughts.recall("", "a") == "Think."
    clock.now_s = 11
    assert thoughts.recall("", "a") is None
    assert thoughts.num_bytes == 0


@given(st.text())
def test_what_is_closed_opens_again(text: str) -> None:
    seal = Seal(b"key")
    assert seal.open(seal.close(text)) == text
    assert Seal(b"key").is_ours(text, seal.sign(text))


def test_what_an_earlier_release_made_is_still_ours() -> None:
    closed = "bt1.7e738dfe.7b2b4a84b5bca75d0f2aed0e38b5c4c8.eJwLycjMy9YDAAf4Ai0="
    assert Seal(b"key").open(closed) == "Think."
    assert Seal(b"key").is_ours("Think.", "bt1.7e738dfe.c0900c623836fa5b677222f56b4b74de")


def test_what_another_key_or_server_made_is_not_ours() -> None:
    other = Seal(b"other")
    assert Seal(b"key").open(other.close("Think.")) is None
    assert not Seal(b"key").is_ours("Think.", other.sign("Think."))
    for foreign in ("", "gAAAAABo", "bt1", "bt1.", "EqQBCkYIARgCKkA="):
        assert Seal(b"key").open(foreign) is None
        assert not Seal(b"key").is_ours("Think.", foreign)


def test_what_was_changed_is_refused() -> None:
    seal = Seal(b"key")
    closed = seal.close("Think.")
    data = closed.rpartition(".")[2]
    flipped = base64.urlsafe_b64encode(bytes(b ^ 1 for b in base64.urlsafe_b64decode(data))).decode()
    with pytest.raises(Changed):
        seal.is_ours("Think.", seal.sign("Think.")[:-1])
    for changed in (closed[:-1], closed + "A", closed.replace(data, flipped), closed.replace(data, "")):
        with pytest.raises(Changed):
            seal.open(changed)
    with pytest.raises(Changed):
        seal.is_ours("Other.", seal.sign("Think."))


@pytest.mark.parametrize(
    "data",
    [b"a", base64.urlsafe_b64encode(b"not compressed"), base64.urlsafe_b64encode(zlib.compress(b"\xff"))],
)
def test_what_a_model_wrote_and_was_signed_for_is_not_taken_for_a_sealed_text(data: bytes) -> None:
    """Clients know the signature of any reasoning, and a client can make a model repeat its words."""
    seal = Seal(b"key")
    with pytest.raises(Changed):
        seal.open(f"{seal.sign(data.decode())}.{data.decode()}")


def test_without_a_key_of_the_operators_a_seal_is_the_process_own() -> None:
    assert Seal().open(Seal().close("Think.")) is None


def test_no_more_than_four_mebibytes_of_a_sealed_text_are_unpacked() -> None:
    seal = Seal(b"key")
    assert len(seal.open(seal.close("x" * (5 << 20))) or "") == 4 << 20
