"""Parsing against openai-harmony, with gpt-oss's real vocabulary (`make vocab`)."""

from collections.abc import Iterator

import openai_harmony as oh  # type: ignore[import-untyped]  # no types
from hypothesis import given
from hypothesis import strategies as st

from frontend.harmony.parse import HarmonyParser
from frontend.text.tokenizer import ModelTokenizer
from tests.repairs import messages

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
