"""xgrammar and the embedded engine's grammar accept the same answers."""

import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import xgrammar

from baton.errors import InvalidRequest
from baton.messages import Guided, MessageForm
from baton.structural_tag import structural_tag
from frontend.harmony.conversation import AnswerFormat, Tool
from frontend.text.tokenizer import ModelTokenizer, SpecialToken
from frontend.turn.request import CallChoice, guided
from tests.guided import (
    CASES,
    MAX_TOKENS,
    allowed_after,
    answer_form,
    answer_of,
    chooser,
    parts_of,
    text_form,
)
from workers.engines.embedded.grammar import Grammars
from workers.engines.library.model_facts import read_model_facts

in_one_loop = pytest.mark.asyncio(loop_scope="module")  # that of `grammars`
DEMO = Path("models/demo")
THOUGHT = "<|channel|>analysis<|message|>a < b,\nÜ <|end|><|start|>assistant"
# xgrammar 0.2 enforces these in part, or not at all; without tokens it closes what is not closed ("nested").
UNLIKE = {"all_of", "multiple", "number", "format", "nested"}
FACTS = read_model_facts(DEMO)
SEEDS = range(4)


def _form(**options: object) -> Guided:
    tools = [Tool(name="f", parameters=CASES["optional"], strict=bool(options.pop("strict", False)))]
    form = guided([*tools, Tool(name="g")], **options)  # type: ignore[arg-type]  # options by name
    assert form is not None
    return form


FORMS = {
    **{name: answer_form(schema) for name, schema in CASES.items() if name not in UNLIKE},
    "a call is demanded": _form(choice=CallChoice(must_call=True)),
    "one call is demanded": _form(choice=CallChoice(must_call=True, names=frozenset({"f"}))),
    "a strict tool": _form(strict=True),
    "a call or a format": _form(answer=AnswerFormat(schema=CASES["any_of"])),
    "a regex": text_form("regex", "[a-f]{2,9}|[^<]x"),
    "a choice": text_form("regex", "yes|no"),
    "raw": Guided(last=(msgspec.structs.replace(text_form("regex", "[ab]+").last[0], headers=("",)),)),
}


class XgrammarForms:
    """The real xgrammar, which compiles forms as TensorRT-LLM and vLLM do, over one model's vocabulary.

    Without `control_ids`, control tokens are text, as in xgrammar before 0.2."""

    def __init__(self, model_path: Path, control_ids: dict[str, int]) -> None:
        self._control_ids = control_ids
        tokenizer = json.loads((model_path / "tokenizer.json").read_text())
        vocabulary: dict[str, int] = dict(tokenizer["model"]["vocab"])
        vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        self.vocab_size = max(vocabulary.values()) + 1
        words = [""] * self.vocab_size
        for word, token_id in vocabulary.items():
            words[token_id] = word
        info = xgrammar.TokenizerInfo(
            words,
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=self.vocab_size,
            stop_token_ids=[vocabulary["<|return|>"]],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._eos = vocabulary["<|return|>"]

    def matcher(self, form: Guided, stop_token_ids: list[int] | None = None) -> xgrammar.GrammarMatcher:
        """With the tokenizer's stop token, unless a request's are given, as vLLM 0.31 does."""
        tag = self._compiler.compile_structural_tag(structural_tag(form, self._control_ids))
        return xgrammar.GrammarMatcher(tag, override_stop_tokens=stop_token_ids)

    def takes(self, form: Guided, answer: list[int]) -> bool:
        """Whether each token is allowed, and then none. After `<|call|>` the engine stops by itself."""
        matcher = self.matcher(form)
        return all(map(matcher.accept_token, answer)) and (
            matcher.is_terminated() or matcher.accept_token(self._eos)
        )

    def answer_of(self, form: Guided, choose: Callable[[list[int]], int]) -> list[int]:
        """An answer whose tokens `choose` picks among the allowed ones; cut after MAX_TOKENS."""
        matcher, answer = self.matcher(form), list[int]()
        while len(answer) < MAX_TOKENS and not matcher.is_terminated():
            answer.append(choose(self.allowed(matcher)))
            assert matcher.accept_token(answer[-1])
        return answer

    def allowed(self, matcher: xgrammar.GrammarMatcher) -> list[int]:
        """The tokens that may come next."""
        bits = xgrammar.allocate_token_bitmask(1, self.vocab_size)
        matcher.fill_next_token_bitmask(bits)
        mask = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little", count=self.vocab_size)
        return np.flatnonzero(mask).tolist()


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(DEMO)


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def forms(request: pytest.FixtureRequest) -> XgrammarForms:
    return XgrammarForms(DEMO, FACTS.control_ids if request.param else {})


@pytest.fixture(scope="module")
def token_forms() -> XgrammarForms:
    return XgrammarForms(DEMO, FACTS.control_ids)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars() -> AsyncIterator[Grammars]:
    grammars = Grammars(DEMO, FACTS.vocab_size)
    yield grammars
    grammars.close()


@pytest.mark.parametrize("name", FORMS)
@in_one_loop
async def test_xgrammar_takes_what_the_embedded_grammar_allows(
    name: str, tokenizer: ModelTokenizer, forms: XgrammarForms, grammars: Grammars
) -> None:
    answers = [await answer_of(grammars, FORMS[name], chooser(seed, tokenizer)) for seed in SEEDS]
    finished = [answer for answer in answers if len(answer) < MAX_TOKENS]
    assert finished
    for answer in finished:
        assert forms.takes(FORMS[name], answer), text_with_controls(tokenizer, answer)


@pytest.mark.parametrize("name", FORMS)
@in_one_loop
async def test_the_embedded_grammar_takes_what_xgrammar_allows(
    name: str, tokenizer: ModelTokenizer, forms: XgrammarForms, grammars: Grammars
) -> None:
    answers = [forms.answer_of(FORMS[name], modest(seed, tokenizer)) for seed in SEEDS]
    finished = [answer for answer in answers if len(answer) < MAX_TOKENS]
    assert finished
    call = tokenizer.special_ids[SpecialToken.CALL]
    for answer in finished:
        if call in answer:
            answer.pop()  # xgrammar's own end
        elif "functions." in tokenizer.decode(answer):
            answer[-1] = call  # with control tokens as text, xgrammar's own end may stand for it
        matcher = await grammars.matcher(FORMS[name])
        assert await allowed_after(matcher, answer) is None
        assert matcher.error is None, text_with_controls(tokenizer, answer)


def modest(seed: int, tokenizer: ModelTokenizer) -> Callable[[list[int]], int]:
    """Any allowed token, except what only xgrammar allows: white space, control tokens within JSON
    strings, those spelled with ordinary tokens, and partial characters."""
    choose, control = chooser(seed, tokenizer), set(tokenizer.special_ids.values())

    def plain(token_id: int) -> bool:
        return not re.search(r"[\s<\ufffd]", tokenizer.decode([token_id]))

    def choose_modestly(allowed: list[int]) -> int:
        is_in_string = len(control.intersection(allowed)) > 2
        modest = [i for i in allowed if (not is_in_string if i in control else plain(i))]
        return choose(modest or allowed)

    return choose_modestly


def text_with_controls(tokenizer: ModelTokenizer, answer: list[int]) -> str:
    names = {token_id: token.value for token, token_id in tokenizer.special_ids.items()}
    return "".join(names.get(token_id) or tokenizer.decode([token_id]) for token_id in answer)


@pytest.mark.parametrize(
    ("name", "answer", "taken"),
    [
        ("optional", '<|channel|>final<|message|>{"b": null}<|return|>', True),
        ("optional", '<|channel|>final<|message|>{"b": 1}<|return|>', False),
        ("optional", '<|channel|>final<|message|>{"b": null}<|end|>', False),
        ("optional", f'{THOUGHT}<|channel|>final <|constrain|>json<|message|>{{"b": null}}<|return|>', True),
        ("optional", f'{THOUGHT}{THOUGHT}<|channel|>final<|message|>{{"b": null}}<|return|>', False),
        ("optional", "<|channel|>analysis<|message|>Hm<|call|>", False),
        ("a call is demanded", f"{THOUGHT}<|channel|>commentary to=functions.g<|message|>{{}}<|call|>", True),
        (
            "a call is demanded",
            ' to=functions.f<|channel|>commentary json<|message|>{"b": null}<|call|>',
            True,
        ),
        ("a call is demanded", "<|channel|>commentary to=functions.h<|message|>{}<|call|>", False),
        ("a call is demanded", "<|channel|>final<|message|>No.<|return|>", False),
        ("a strict tool", f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>x <| y << <<|return|>", True),
        ("a strict tool", "<|channel|>commentary to=functions.g<|message|>what I like<|call|>", True),
        ("a strict tool", "<|channel|>commentary to=functions.f<|message|>what I like<|call|>", False),
    ],
)
@in_one_loop
async def test_both_take_the_same_answers(
    name: str, answer: str, taken: bool, forms: XgrammarForms, grammars: Grammars
) -> None:
    token_ids = ModelTokenizer.load(DEMO).encode_text(answer, allow_special=True)
    matcher = await grammars.matcher(FORMS[name])
    assert forms.takes(FORMS[name], token_ids) is taken
    assert (await allowed_after(matcher, token_ids) is None and matcher.error is None) is taken


def test_a_call_may_end_with_a_stop_token_of_the_request(tokenizer: ModelTokenizer) -> None:
    call = "<|channel|>commentary to=functions.g<|message|>{}<|call|>"
    stops = [tokenizer.special_ids[token] for token in (SpecialToken.RETURN, SpecialToken.CALL)]
    matcher = XgrammarForms(DEMO, {}).matcher(FORMS["a call is demanded"], stops)
    assert all(map(matcher.accept_token, tokenizer.encode_text(call, allow_special=True)))
    assert matcher.is_terminated()


@pytest.mark.parametrize("seed", SEEDS)
def test_an_answer_matches_its_ebnf(seed: int, tokenizer: ModelTokenizer, forms: XgrammarForms) -> None:
    form = text_form("ebnf", 'root ::= "Token: " [0-9]{1,3}')
    answer = forms.answer_of(form, modest(seed, tokenizer))
    assert re.fullmatch("Token: [0-9]{1,3}", parts_of(tokenizer, answer, set())[1])


def test_a_schema_is_written_once() -> None:
    assert structural_tag(FORMS["one call is demanded"], {}).count('"required"') == 1


def test_an_invalid_schema_or_a_leading_messages_is_refused() -> None:
    message = MessageForm(headers=("x",), end="<|return|>", grammar="[]", param="p")
    with pytest.raises(InvalidRequest, match="`p` cannot be enforced"):
        structural_tag(Guided(last=(message,)), {})
    with pytest.raises(InvalidRequest, match="leading message"):
        structural_tag(Guided(leading=(message,), last=(msgspec.structs.replace(message, grammar="{}"),)), {})


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        (text_form("lark", "start: /a/"), "Lark"),
        (text_form("json_schema", '{"type": "nope"}'), "nope"),
        (text_form("regex", "(a"), "parenthesis"),
        (text_form("regex", r"\\[\^a]"), "begin with"),
        (text_form("ebnf", r"root ::= [\x5E-a]"), "begin with"),
        (text_form("json_schema", r'{"anyOf": [{"items": {"pattern": "^[\\^a]"}}]}'), "begin with"),
        (text_form("json_schema", r'{"patternProperties": {"[\\x5ea]": {}}}'), "begin with"),
        (text_form("ebnf", "rot ::= b"), "root"),
        (text_form("ebnf", "root ::= Token(5)"), "tokens"),
        (text_form("ebnf", 'root ::= TagDispatch(("<f>", a))'), "tokens"),
        (text_form("ebnf", 'root ::= "<|call|>"'), "tokens"),
    ],
)
def test_a_grammar_that_xgrammar_refuses_is_refused_by_its_field(form: Guided, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=f"`p` cannot be enforced: .*{problem}") as caught:
        structural_tag(form, FACTS.control_ids)
    assert caught.value.param == "p"


@pytest.mark.parametrize(
    "form",
    [
        text_form("regex", ".*"),
        text_form("regex", r"[^\n]{3,90}"),
        text_form("regex", r"[\x20-\x7e]+"),
        text_form("regex", r"[{-}|]+[<|a-z>]*"),
        text_form("ebnf", r'root ::= "a|" [^a]* [!-~]+'),
    ],
)
def test_no_text_of_a_grammar_is_a_control_token(form: Guided, token_forms: XgrammarForms) -> None:
    matcher = token_forms.matcher(form)
    for token_id in ModelTokenizer.load(DEMO).encode_text("<|channel|>final<|message|>", allow_special=True):
        assert matcher.accept_token(token_id)
    controls = set(FACTS.control_ids.values()) - {FACTS.control_ids["<|return|>"]}
    assert not controls & set(token_forms.allowed(matcher))


@pytest.mark.parametrize(
    "allowed", [r"[+*/|^-]", r"[|^-~+]", r"[\w|^+]", r"[&|+^]", r"[^|a]", r"[\t-}]", r"[+\^]"]
)
def test_a_class_of_characters_loses_only_the_bar(
    allowed: str, token_forms: XgrammarForms, tokenizer: ModelTokenizer
) -> None:
    form = text_form("regex", f"{allowed}+")
    for text, is_allowed in (
        ("^", True),
        ("+^+", True),
        ("|", False),
        ("^|", False),
        ("\x07", allowed[1] == "^"),
    ):
        answer = f"<|channel|>final<|message|>{text}<|return|>"
        token_ids = tokenizer.encode_text(answer, allow_special=True)
        assert token_forms.takes(form, token_ids) is is_allowed, text


@pytest.mark.parametrize(
    "answer",
    [
        f"{THOUGHT}<|channel|>commentary to=functions.g <|constrain|>json<|message|>{{}}<|call|>",
        " to=functions.g<|channel|>analysis json<|message|>{}<|call|>",
    ],
)
def test_a_control_token_cannot_be_spelled(
    answer: str, token_forms: XgrammarForms, tokenizer: ModelTokenizer
) -> None:
    form, controls = FORMS["a call is demanded"], set(FACTS.control_ids.values())
    matcher = token_forms.matcher(form)
    is_free = False
    for token_id in tokenizer.encode_text(answer, allow_special=True):
        if token_id in controls and not is_free:
            others = set(token_forms.allowed(matcher)) - controls
            assert not [i for i in others if tokenizer.decode([i]).startswith("<")]
        assert matcher.accept_token(token_id)
        is_free = text_with_controls(tokenizer, [token_id]) == "<|message|>" or (
            is_free and token_id not in controls
        )
    assert token_forms.takes(form, tokenizer.encode_text(answer, allow_special=True))
    assert not token_forms.takes(form, tokenizer.encode_text(answer))


@pytest.mark.parametrize(
    ("schema", "beginnings"),
    [
        ({"type": "string"}, ["", "a", "a <", "<<", "<|", "a<<|"]),
        ({"type": "string", "minLength": 1}, ["", "a <"]),
        ({"type": "string", "maxLength": 20}, ["", "a <"]),
    ],
)
def test_a_json_string_has_no_control_token(
    schema: dict[str, object], beginnings: list[str], token_forms: XgrammarForms, tokenizer: ModelTokenizer
) -> None:
    for beginning in beginnings:
        matcher = token_forms.matcher(answer_form({"type": "array", "items": schema}))
        answer = f'<|channel|>final<|message|>["{beginning}'
        assert all(map(matcher.accept_token, tokenizer.encode_text(answer, allow_special=True)))
        assert not set(token_forms.allowed(matcher)) & set(FACTS.control_ids.values())
        assert all(map(matcher.accept_token, tokenizer.encode_text('B < c>"]')))


def test_white_space_in_json_has_a_limit(forms: XgrammarForms, tokenizer: ModelTokenizer) -> None:
    matcher = forms.matcher(answer_form({"type": "array", "items": {"type": "integer"}}))
    (space,) = tokenizer.encode_text(" ")
    answer = tokenizer.encode_text("<|channel|>final<|message|>[", allow_special=True)
    assert all(map(matcher.accept_token, [*answer, *[space] * 17]))
    assert not matcher.accept_token(space)
