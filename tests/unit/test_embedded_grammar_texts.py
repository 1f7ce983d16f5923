"""Answers held to regular expressions and Lark grammars, over the demo model's vocabulary."""

import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from baton.errors import InvalidRequest
from baton.messages import Guided, Syntax
from frontend.text.tokenizer import ModelTokenizer
from tests.guided import MAX_TOKENS, allowed_after, answer_of, chooser, parts_of, text_form
from workers.engines.embedded.grammar import Grammars

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO = Path("models/demo")
SUM = """start: NUMBER ("+" NUMBER)*  // <a> sum
NUMBER: /[0-9]{1,3}/
%ignore " "
"""


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(DEMO)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars() -> AsyncIterator[Grammars]:
    grammars = Grammars(DEMO, 3200)
    yield grammars
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
async def test_every_answer_matches(
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
async def test_what_cannot_be_enforced_is_refused_with_its_field(
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
