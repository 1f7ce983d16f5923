"""The grammar allows exactly the requested form: random answers over the demo model's vocabulary."""

import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.messages import Guided, MessageForm, Syntax
from frontend.harmony.conversation import Tool
from frontend.text.tokenizer import ModelTokenizer, SpecialToken
from frontend.turn.request import CallChoice, guided
from tests.guided import (
    CASES,
    MAX_TOKENS,
    SCHEMAS,
    Json,
    allowed_after,
    answer_form,
    answer_of,
    check,
    chooser,
    parts_of,
    text_form,
)
from workers.engines.embedded.grammar import Grammars

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO = Path("models/demo")
VOCAB_SIZE = 3200  # logits may be wider than the vocabulary
SUM = """start: NUMBER ("+" NUMBER)*  // <a> sum
NUMBER: /[0-9]{1,3}/
%ignore " "
"""


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(DEMO)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars() -> AsyncIterator[Grammars]:
    grammars = Grammars(DEMO, VOCAB_SIZE)
    yield grammars
    grammars.close()


@pytest.mark.parametrize("case", CASES)
async def test_every_complete_answer_validates(
    case: str, grammars: Grammars, tokenizer: ModelTokenizer
) -> None:
    num_complete = 0
    for seed in range(25):
        answer = await answer_of(grammars, answer_form(CASES[case]), chooser(seed, tokenizer))
        if len(answer) < MAX_TOKENS:
            num_complete += 1
            assert answer[-1] == tokenizer.special_ids[SpecialToken.RETURN]
            check(CASES[case], parts_of(tokenizer, answer, set())[1])
    assert num_complete > 5


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
async def test_any_schema_gives_answers_that_validate(
    grammars: Grammars, tokenizer: ModelTokenizer, schema: Json, seed: int
) -> None:
    answer = await answer_of(grammars, answer_form(schema), chooser(seed, tokenizer))
    if len(answer) < MAX_TOKENS:
        check(schema, parts_of(tokenizer, answer, set())[1])


@pytest.mark.xfail(reason="llguidance 1.9.1: an excluded integer bound of a range shorter than 1 is allowed")
async def test_an_excluded_bound_is_excluded_in_a_range_shorter_than_one(
    grammars: Grammars, tokenizer: ModelTokenizer
) -> None:
    schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
    for seed in range(25):
        answer = await answer_of(grammars, answer_form(schema), chooser(seed, tokenizer))
        check(schema, parts_of(tokenizer, answer, set())[1])


async def test_thinking_is_free(grammars: Grammars, tokenizer: ModelTokenizer) -> None:
    thought = 'Hm: {"a"} <b> ünïcödé 思考\n\nand `code`, <|end|> spelled out.'
    special = tokenizer.special_ids
    head = [
        special[SpecialToken.CHANNEL], *tokenizer.encode_text("analysis"), special[SpecialToken.MESSAGE],
        *tokenizer.encode_text(thought),
        special[SpecialToken.END], special[SpecialToken.START], *tokenizer.encode_text("assistant"),
    ]  # fmt: skip
    matcher = await grammars.matcher(answer_form(CASES["nested"]))
    for i, token_id in enumerate(head):
        allowed = await allowed_after(matcher, head[:i])
        assert allowed is not None
        assert allowed[token_id], tokenizer.decode(head[: i + 1])


@pytest.mark.parametrize("leads_once", [False, True])
async def test_a_demanded_answer_is_not_put_off_by_thinking_again(
    grammars: Grammars, tokenizer: ModelTokenizer, leads_once: bool
) -> None:
    form = msgspec.structs.replace(answer_form({"const": 1}), leads_once=leads_once)
    thought = "<|channel|>analysis<|message|>once<|end|><|start|>assistant<|channel|>"
    token_ids = tokenizer.encode_text(thought, allow_special=True)
    matcher = await grammars.matcher(form)

    allowed = await allowed_after(matcher, token_ids)

    assert allowed is not None
    again = tokenizer.encode_text("analysis")[0]
    assert bool(allowed[again]) is not leads_once
    assert allowed[tokenizer.encode_text("final")[0]]


@pytest.mark.parametrize("text", ["abc", "<|channel|>final<|message|>2"])
async def test_tokens_that_do_not_have_the_form_are_an_error_of_the_request(
    grammars: Grammars, tokenizer: ModelTokenizer, text: str
) -> None:
    matcher = await grammars.matcher(answer_form({"const": 1}))
    assert await allowed_after(matcher, tokenizer.encode_text(text, allow_special=True)) is None
    assert isinstance(matcher.error, InvalidRequest)


async def test_json_has_a_space_or_an_indented_line_between_its_parts(
    grammars: Grammars, tokenizer: ModelTokenizer
) -> None:
    form = answer_form({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    head = tokenizer.encode_text("<|channel|>final<|message|>", allow_special=True)
    for text, then, is_allowed in (
        ("{", " ", True),
        ("{ ", " ", False),
        ("{", "\n", True),
        ("{\n", "\n", False),
        ("{\n" + 15 * " ", " ", True),
        ("{\n" + 16 * " ", " ", False),
    ):
        answer = [*head, *(i for character in text for i in tokenizer.encode_text(character))]
        allowed = await allowed_after(await grammars.matcher(form), answer)
        assert allowed is not None
        assert bool(allowed[tokenizer.encode_text(then)[0]]) is is_allowed, (text, then)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {}}, "not"),
        ({"$ref": "https://example.com/schema.json"}, "example.com"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "text"}, "text"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
    ],
)
async def test_what_cannot_be_compiled_is_refused_with_field_and_reason(
    grammars: Grammars, schema: Json, reason: str
) -> None:
    form = guided([Tool(name="f", parameters=schema, strict=True, path="tools[0].function")])
    assert form is not None
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await grammars.matcher(form)
    assert caught.value.param == "tools[0].function.parameters"


async def test_of_two_tools_the_one_that_cannot_be_enforced_is_named(grammars: Grammars) -> None:
    lenient = {"type": "array", "uniqueItems": True}
    tools = [
        Tool(name="f", parameters=lenient, path="tools[0]"),
        Tool(name="g", parameters={"not": {}}, strict=True, path="tools[1]"),
    ]
    form = guided(tools, CallChoice(must_call=True))
    assert form is not None
    with pytest.raises(InvalidRequest) as caught:
        await grammars.matcher(form)
    assert caught.value.param == "tools[1].parameters"


async def test_a_schema_that_nests_or_grows_without_end_is_refused(grammars: Grammars) -> None:
    text = '{"items":' * 5000 + "{}" + "}" * 5000
    form = Guided(
        last=(MessageForm(headers=("<|channel|>final<|message|>",), end="<|return|>", grammar=text),)
    )
    with pytest.raises(InvalidRequest):
        await grammars.matcher(form)
    options = [{"oneOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(4)]} for i in range(8)]
    with pytest.raises(InvalidRequest, match="schema too large"):
        await grammars.matcher(answer_form({"type": "object", "allOf": options}))


@pytest.mark.parametrize(("num_properties", "is_served"), [(500, True), (1000, False)])
async def test_a_form_that_is_too_complex_to_follow_ends_its_own_request_only(
    grammars: Grammars, tokenizer: ModelTokenizer, num_properties: int, is_served: bool
) -> None:
    many = {"type": "object", "properties": {f"p{i}": {"const": 1} for i in range(num_properties)}}
    form = answer_form({**many, "additionalProperties": False})
    matcher = await grammars.matcher(form)
    head = tokenizer.encode_text('<|channel|>final<|message|>{"', allow_special=True)
    assert (await allowed_after(matcher, head) is not None) == is_served
    assert (matcher.error is None) == is_served
    if matcher.error is not None:
        assert "items" in matcher.error.message
        assert "\n" not in matcher.error.message
    assert (await grammars.matcher(answer_form({}))).allowed is not None


async def test_a_model_without_a_tokenizer_cannot_be_guided(tmp_path: Path) -> None:
    grammars = Grammars(tmp_path, VOCAB_SIZE)
    with pytest.raises(InvalidRequest, match="tokenizer"):
        await grammars.matcher(answer_form({}))
    grammars.close()


async def texts(grammars: Grammars, tokenizer: ModelTokenizer, form: Guided) -> list[str]:
    answers = [await answer_of(grammars, form, chooser(seed, tokenizer)) for seed in range(12)]
    return [parts_of(tokenizer, answer, set())[1] for answer in answers if len(answer) < MAX_TOKENS]


@pytest.mark.parametrize(
    ("syntax", "grammar", "pattern"),
    [
        ("regex", "[0-9]{4}-[01][0-9]", "[0-9]{4}-[01][0-9]"),
        ("regex", r"a/b\/[c/]|d", "a/b/[c/]|d"),
        ("regex", "a\nb|\\|\\n", r"a\nb|\|\n"),
        ("regex", "a\\\nb|\\\\n", r"a\nb|\\n"),
        ("regex", r"<\|call\|>|<\|end\|>", r"<\|(call|end)\|>"),
        ("lark", SUM, r" *[0-9]{1,3}( *\+ *[0-9]{1,3})* *"),
        ("lark", 'start: "<|call|>" | /<@>/ | "//" "x"', r"<\|call\|>|<@>|//x"),
        ("lark", "%import common.INT\nstart: INT", "[0-9]+"),
    ],
)
async def test_every_text_matches_its_grammar(
    syntax: Syntax, grammar: str, pattern: str, grammars: Grammars, tokenizer: ModelTokenizer
) -> None:
    found = await texts(grammars, tokenizer, text_form(syntax, grammar))
    assert found
    for text in found:
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("syntax", "grammar", "problem"),
    [
        ("regex", "(a", "unclosed"),
        ("regex", "a(?=b)", "look-around"),
        ("lark", "start: <|call|>", "'<'"),
        ("lark", 'start: "a" <[200012]>', "'<'"),
        ("lark", "start: @start", "'@'"),
        ("lark", "start: %llguidance {}", "'%'"),
        ("lark", "start: %json {}", "'%'"),
        ("lark", "begin: /a/", "start"),
        ("lark", "start: b", "b"),
        ("ebnf", 'root ::= "a"', "EBNF"),
    ],
)
async def test_a_text_grammar_that_cannot_be_enforced_is_refused_with_its_field(
    syntax: Syntax, grammar: str, problem: str, grammars: Grammars
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await grammars.matcher(text_form(syntax, grammar))
    assert caught.value.param == "p"
    assert problem in caught.value.message


async def test_an_expression_that_grows_with_the_answer_ends_it(
    grammars: Grammars, tokenizer: ModelTokenizer
) -> None:
    rng = random.Random(1)
    text = "<|channel|>final<|message|>" + "".join(rng.choice("ab") for _ in range(60_000))
    matcher = await grammars.matcher(text_form("regex", "(a|b)*a(a|b){18}"))
    assert await allowed_after(matcher, tokenizer.encode_text(text, allow_special=True)) is None
    assert matcher.error is not None
    assert "too many expressions" in matcher.error.message
