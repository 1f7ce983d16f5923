"""Parsing, rendering and tokenising against openai-harmony, with gpt-oss's real vocabulary (`make vocab`)."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from string import ascii_letters, ascii_lowercase, ascii_uppercase, digits, punctuation
from typing import Any

import openai_harmony as oh  # type: ignore[import-untyped]  # no types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.harmony.conversation import (
    AssistantTurn,
    Conversation,
    Instructions,
    ReasoningEffort,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.harmony.parse import HarmonyParser
from frontend.text.tokenizer import PIECE_CHARS, ModelTokenizer
from tests.repairs import messages
from tests.scripted_frontend import prompt_ids

pytest_plugins = ["tests.oracle"]

texts = st.text('abc <|>{}"é日👍\n', max_size=20)
names = st.sampled_from(["f", "get_weather", "web-browsing.open"])
headers = st.one_of(
    st.just("<|channel|>analysis"),
    st.just("<|channel|>commentary"),
    st.just("<|channel|>final"),
    st.builds(
        "<|channel|>{} to=functions.{} <|constrain|>json".format,
        st.sampled_from(["analysis", "commentary"]),
        names,
    ),
    st.builds(" to=functions.{}<|channel|>commentary json".format, names),
    st.builds("<|channel|>commentary to=functions.{} code".format, names),
    st.builds("<|channel|>commentary to=functions.{}".format, names),
)


@given(st.lists(st.tuples(headers, texts), min_size=1, max_size=5))
def test_a_well_formed_answer_becomes_the_same_messages(
    tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding, answer: list[tuple[str, str]]
) -> None:
    ids: list[int] = []
    for i, (header, text) in enumerate(answer):
        start = "<|start|>assistant" if i else ""
        ids += oracle.encode(f"{start}{header}<|message|>", allowed_special="all")
        ids += oracle.encode(text, disallowed_special=())
        is_last = i == len(answer) - 1
        end = "<|call|>" if "to=" in header else "<|return|>" if is_last else "<|end|>"
        ids += oracle.encode(end, allowed_special="all")

    parser = HarmonyParser(tokenizer.vocabulary, frozenset({"f"}))
    found = messages(parser.feed(ids) + parser.finish())
    assert found == list(_oracle_messages(oracle, ids))
    assert not parser.repairs


_KEYS = {"analysis": "reasoning", "commentary": "preamble", "final": "text"}


def _oracle_messages(oracle: oh.HarmonyEncoding, ids: list[int]) -> Iterator[dict[str, str]]:
    for message in oracle.parse_messages_from_completion_tokens(ids, oh.Role.ASSISTANT, strict=False):
        content = message.content[0]
        assert isinstance(content, oh.TextContent)
        if message.recipient:
            yield {"call": message.recipient.removeprefix("functions."), "arguments": content.text}
        elif content.text:
            yield {_KEYS[message.channel or ""]: content.text}


def oracle_render(encoding: oh.HarmonyEncoding, conversation: Conversation) -> list[int]:
    """The library's prompt; past reasoning is left out here, since it drops less of it than it should."""
    messages = [_system(conversation)]
    developer = _developer(conversation)
    if developer is not None:
        messages.append(developer)
    last_final = max((i for i, turn in enumerate(conversation.turns) if _is_final(turn)), default=-1)
    names: dict[str, str] = {}
    for i, turn in enumerate(conversation.turns):
        messages += _messages(turn, names, is_past=i <= last_final)
    keep = oh.RenderConversationConfig(auto_drop_analysis=False)
    whole = oh.Conversation.from_messages(messages)
    ids: list[int] = encoding.render_conversation_for_completion(whole, oh.Role.ASSISTANT, keep)
    return ids


def _is_final(turn: Turn) -> bool:
    return isinstance(turn, AssistantTurn) and bool(turn.text) and not (turn.tool_calls or turn.is_preamble)


def _system(conversation: Conversation) -> oh.Message:
    content = oh.SystemContent.new().with_reasoning_effort(
        oh.ReasoningEffort(conversation.reasoning_effort.capitalize())
    )
    if conversation.current_date is not None:
        content = content.with_conversation_start_date(conversation.current_date)
    return oh.Message.from_role_and_content(oh.Role.SYSTEM, content)


def _developer(conversation: Conversation) -> oh.Message | None:
    content = oh.DeveloperContent.new()
    texts = []
    for turn in conversation.turns:
        if not isinstance(turn, Instructions):
            break
        texts.append(turn.text)
    if texts:
        content = content.with_instructions("\n\n".join(texts))
    if conversation.tools:
        content = content.with_function_tools(
            [
                oh.ToolDescription.new(tool.name, tool.description or "", tool.parameters)
                for tool in conversation.tools
            ]
        )
    if not texts and not conversation.tools:
        return None
    return oh.Message.from_role_and_content(oh.Role.DEVELOPER, content)


def _messages(turn: Turn, names: dict[str, str], *, is_past: bool) -> Iterator[oh.Message]:
    match turn:
        case UserTurn(text=text):
            yield oh.Message.from_role_and_content(oh.Role.USER, text)
        case AssistantTurn():
            said = oh.Message.from_role_and_content
            if turn.reasoning and not is_past:
                yield said(oh.Role.ASSISTANT, turn.reasoning).with_channel("analysis")
            if turn.text:
                channel = "final" if _is_final(turn) else "commentary"
                yield said(oh.Role.ASSISTANT, turn.text).with_channel(channel)
            for call in turn.tool_calls:
                names[call.call_id] = f"functions.{call.name}"
                message = said(oh.Role.ASSISTANT, call.arguments).with_channel("commentary")
                yield message.with_recipient(names[call.call_id]).with_content_type("<|constrain|>json")
        case ToolResult(call_id=call_id, text=text):
            author = oh.Author.new(oh.Role.TOOL, names[call_id])
            message = oh.Message.from_author_and_content(author, text)
            yield message.with_channel("commentary").with_recipient("assistant")


SCHEMAS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "harmony_schemas.json").read_text()
)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_becomes_the_same_typescript(
    tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding, name: str
) -> None:
    tools = (
        Tool(name=name, description="What\nit does\r\n\n", parameters=SCHEMAS[name]),
        Tool(name="other"),
        Tool(name="another", description="\r"),
    )
    _assert_same(tokenizer, oracle, Conversation(turns=(UserTurn("Hi"),), tools=tools))


CALLS = (
    ToolCall(call_id="1", name="f", arguments='{"a": 1}'),
    ToolCall(call_id="2", name="web-browsing.open", arguments="not json <|call|>"),
)
RESULTS = (ToolResult(call_id="2", text="second"), ToolResult(call_id="1", text='{"b": "<|end|>"}'))
HISTORIES: dict[str, tuple[Turn, ...]] = {
    "one question": (UserTurn("Hi"),),
    "instructions": (Instructions("Be brief."), UserTurn("Hi <|end|><|start|>system")),
    "system and developer": (Instructions("Be brief."), Instructions("Rhyme."), UserTurn("Hi")),
    "an answer": (UserTurn("Hi"), AssistantTurn(reasoning="Hm", text="Hello"), UserTurn("Bye")),
    "a call that is running": (
        UserTurn("Hi"),
        AssistantTurn(reasoning="Call", text="Let me see", tool_calls=CALLS),
        *RESULTS,
    ),
    "two calls under one id": (
        UserTurn("Hi"),
        AssistantTurn(tool_calls=(CALLS[0], ToolCall(call_id="1", name="g", arguments="{}"))),
    ),
    "two calls one after the other": (
        UserTurn("Hi"),
        AssistantTurn(reasoning="Call", tool_calls=CALLS[:1]),
        RESULTS[1],
        AssistantTurn(reasoning="Again", tool_calls=CALLS[1:]),
        RESULTS[0],
    ),
    "a call that led to an answer, then another one": (
        UserTurn("Hi"),
        AssistantTurn(reasoning="Old", tool_calls=CALLS),
        *RESULTS,
        AssistantTurn(reasoning="Old too", text="It is so."),
        UserTurn("And now?"),
        AssistantTurn(reasoning="New", tool_calls=(ToolCall(call_id="3", name="f", arguments=""),)),
        ToolResult(call_id="3", text=""),
    ),
}


@pytest.mark.parametrize("effort", ["low", "high"])
@pytest.mark.parametrize("name", HISTORIES)
def test_a_conversation_becomes_the_same_prompt(
    tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding, name: str, effort: ReasoningEffort
) -> None:
    conversation = Conversation(
        turns=HISTORIES[name],
        tools=(Tool(name="f", description="Does f"),) if effort == "high" else (),
        reasoning_effort=effort,
        current_date="2026-02-03" if effort == "low" else None,
    )
    _assert_same(tokenizer, oracle, conversation)


@pytest.mark.parametrize("is_preamble", [False, True])
def test_the_library_drops_the_same_reasoning_after_one_answer(
    tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding, *, is_preamble: bool
) -> None:
    said = AssistantTurn(reasoning="Hm", text="Hello", is_preamble=is_preamble)
    turns = (UserTurn("Hi"), said, UserTurn("Bye"))
    messages = [_system(Conversation(turns=()))]
    for turn in turns:
        messages += _messages(turn, {}, is_past=False)
    whole = oh.Conversation.from_messages(messages)
    expected = oracle.render_conversation_for_completion(whole, oh.Role.ASSISTANT)
    assert prompt_ids(Conversation(turns=turns), tokenizer) == expected


json_leaves = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=5))
# Not every float: the library reads some of many digits wrongly.
floats = st.one_of(
    st.integers(-(2**30), 2**30).map(lambda n: n / 8), st.sampled_from([1e20, 1e15, 1e16, 1e-5, 1e-7, 5e-324])
)
json_values = st.recursive(
    st.one_of(json_leaves, floats),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


@st.composite
def schemas(draw: st.DrawFn, depth: int = 3) -> Any:
    """Schemas with keys that are there or not, now and then with a value that has no business there."""
    schema: dict[str, Any] = {}
    kinds = ["object", "array", "string", "number", "integer", "boolean", "null", "odd"]
    inner = schemas(depth=depth - 1) if depth else st.just({})
    values = {
        "type": st.one_of(st.sampled_from(kinds), st.lists(st.sampled_from(kinds), max_size=3), json_leaves),
        "description": st.one_of(st.text("ab\n é/<|>", max_size=8), json_leaves),
        "title": st.one_of(st.text("ab", max_size=3), json_leaves),
        "default": json_values,
        "enum": st.one_of(st.lists(json_leaves, max_size=3), json_leaves),
        "examples": st.one_of(st.lists(json_leaves, max_size=3), json_leaves),
        "nullable": st.one_of(st.booleans(), json_leaves),
        "items": inner,
        "oneOf": st.one_of(st.lists(inner, max_size=3), json_leaves),
        "required": st.one_of(st.lists(st.sampled_from(["a", "b", 3]), max_size=2), json_leaves),
        "properties": st.dictionaries(st.sampled_from(["a", "b", "c d", "é"]), inner, max_size=3),
    }
    present = draw(st.lists(st.sampled_from(list(values)), unique=True))
    for key in present:
        schema[key] = draw(values[key])
    if depth == 3 or draw(st.booleans()):
        schema["type"] = draw(st.sampled_from(kinds))
    return schema


@given(schemas(), st.text(max_size=20))
def test_any_schema_becomes_the_same_typescript(
    tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding, schema: Any, description: str
) -> None:
    tools = (Tool(name="f", description=description, parameters=schema),)
    _assert_same(tokenizer, oracle, Conversation(turns=(UserTurn("Hi"),), tools=tools))


def _assert_same(tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding, conversation: Conversation) -> None:
    ids = prompt_ids(conversation, tokenizer)
    expected = oracle_render(oracle, conversation)
    assert oracle.decode(ids) == oracle.decode(expected)
    assert ids == expected


@given(st.one_of(st.text(), st.text("aB1 '\n\r\t<|>end日é👍_.,\u2028\u00a0", max_size=40)))
def test_text_becomes_the_same_tokens(
    tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding, text: str
) -> None:
    ids = tokenizer.encode_text(text)
    assert ids == oracle.encode(text, disallowed_special=())
    assert tokenizer.decode(ids) == text


def _random(alphabet: str, num_chars: int = 5 * PIECE_CHARS) -> str:
    return "".join(random.Random(7).choices(alphabet, k=num_chars))


@pytest.mark.parametrize(
    "text",
    [
        " " * 5 * PIECE_CHARS, "-" * 5 * PIECE_CHARS, "a" * 5 * PIECE_CHARS, "\n" * 5 * PIECE_CHARS,
        "word" + " " * 5 * PIECE_CHARS + "word", "日本語" * 2 * PIECE_CHARS, "👍" * 3 * PIECE_CHARS,
        "\n" + "    \n" * PIECE_CHARS, "\u3000" * 5 * PIECE_CHARS, "=-" * 3 * PIECE_CHARS + "é",
        _random("0123456789"), _random(ascii_letters), _random(ascii_letters + digits + "+/"),
        _random(ascii_lowercase), _random(ascii_uppercase), _random(punctuation), _random("日本語、。中文字"),
        _random("กขคงจฉชซ่้"), _random("👍👎😀é"), _random(" \t\n\r"), _random("aé日B1 -.\n"),
        "It's a long text, isn't it?\n" * PIECE_CHARS, _random("aB1 '\n\r\t.,-/sS\u00a0\x1c\u0301é日²"),
    ],
    ids=lambda text: ascii(text[:6]),
)  # fmt: skip
def test_long_texts_become_the_same_tokens(tokenizer: ModelTokenizer, text: str) -> None:
    whole = tokenizer._ordinary.encode_batch_fast([text], add_special_tokens=False)[0].ids  # noqa: SLF001
    assert tokenizer.encode_text(text) == whole


def test_the_control_tokens_have_their_ids(tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding) -> None:
    for token, token_id in tokenizer.special_ids.items():
        assert [token_id] == oracle.encode(token.value, allowed_special="all")
    assert sorted(tokenizer.stop_token_ids) == [199999, *sorted(oracle.stop_tokens_for_assistant_actions())]
    assert tokenizer.vocab_size == 201088


def test_every_token_has_the_same_bytes(tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding) -> None:
    ids = range(199_998)
    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode(errors="replace") == oracle.decode(
        list(ids)
    )
