"""The real xgrammar holds answers to the forms that the embedded engine's grammar does: same answers."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xgrammar

from baton.errors import InvalidRequest
from baton.messages import Guided, MessageForm
from frontend.guided import AnswerFormat, CallChoice, OfferedTool, guided
from frontend.harmony.specials import SpecialToken
from frontend.tokenizer import ModelTokenizer
from tests.guided import CASES, MAX_TOKENS, answer_form, answer_of, chooser
from workers.engines.embedded.grammar import Grammars
from workers.engines.structural_tag import structural_tag

DEMO = Path("models/demo")
THOUGHT = "<|channel|>analysis<|message|>a < b,\nÜ <|end|><|start|>assistant"
# xgrammar 0.2 enforces these in part, or not at all; and an object that is not closed ("nested") it closes.
UNLIKE = {"all_of", "multiple", "number", "format", "nested"}
SEEDS = range(4)


def _form(**options: object) -> Guided:
    tools = [OfferedTool(name="f", parameters=CASES["optional"], strict=bool(options.pop("strict", False)))]
    form = guided([*tools, OfferedTool(name="g")], **options)  # type: ignore[arg-type]
    assert form is not None
    return form


FORMS = {
    **{name: answer_form(schema) for name, schema in CASES.items() if name not in UNLIKE},
    "a call is demanded": _form(choice=CallChoice(must_call=True)),
    "one call is demanded": _form(choice=CallChoice(must_call=True, names=frozenset({"f"}))),
    "a strict tool": _form(strict=True),
    "a call or a format": _form(answer=AnswerFormat(schema=CASES["any_of"])),
}


class XgrammarForms:
    """Compiles forms as TensorRT-LLM and vLLM do, over the demo model's vocabulary."""

    def __init__(self) -> None:
        tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
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

    def matcher(self, form: Guided) -> xgrammar.GrammarMatcher:
        return xgrammar.GrammarMatcher(self._compiler.compile_structural_tag(structural_tag(form)))

    def takes(self, form: Guided, answer: list[int]) -> bool:
        """Whether each token is allowed, and then nothing. After `<|call|>` the engine stops by itself."""
        matcher = self.matcher(form)
        return all(map(matcher.accept_token, answer)) and (
            matcher.is_terminated() or matcher.accept_token(self._eos)
        )

    def answer_of(self, form: Guided, choose: Callable[[list[int]], int]) -> list[int]:
        """An answer whose tokens `choose` picks among those that are allowed; cut after MAX_TOKENS."""
        matcher, bits = self.matcher(form), xgrammar.allocate_token_bitmask(1, self.vocab_size)
        answer: list[int] = []
        while len(answer) < MAX_TOKENS and not matcher.is_terminated():
            matcher.fill_next_token_bitmask(bits)
            mask = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little", count=self.vocab_size)
            answer.append(choose(np.flatnonzero(mask).tolist()))
            assert matcher.accept_token(answer[-1])
        return answer


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(DEMO)


@pytest.fixture(scope="module")
def forms() -> XgrammarForms:
    return XgrammarForms()


@pytest.fixture(scope="module")
def grammars(forms: XgrammarForms) -> Iterator[Grammars]:
    grammars = Grammars.load(DEMO, forms.vocab_size)
    yield grammars
    grammars.close()


@pytest.mark.parametrize("name", FORMS)
def test_xgrammar_takes_what_the_embedded_grammar_allows(
    name: str, tokenizer: ModelTokenizer, forms: XgrammarForms, grammars: Grammars
) -> None:
    answers = [answer_of(grammars, FORMS[name], chooser(seed, tokenizer)) for seed in SEEDS]
    finished = [answer for answer in answers if len(answer) < MAX_TOKENS]
    assert finished
    for answer in finished:
        assert forms.takes(FORMS[name], answer), said(tokenizer, answer)


@pytest.mark.parametrize("name", FORMS)
def test_the_embedded_grammar_takes_what_xgrammar_allows(
    name: str, tokenizer: ModelTokenizer, forms: XgrammarForms, grammars: Grammars
) -> None:
    answers = [forms.answer_of(FORMS[name], modest(seed, tokenizer)) for seed in SEEDS]
    finished = [answer for answer in answers if len(answer) < MAX_TOKENS]
    assert finished
    for answer in finished:
        if tokenizer.special_ids[SpecialToken.CALL] in answer:
            answer.pop()  # xgrammar's own end
        matcher = asyncio.run(grammars.matcher(FORMS[name]))
        assert matcher.allowed(answer, 0) is None
        assert matcher.error is None, said(tokenizer, answer)


def modest(seed: int, tokenizer: ModelTokenizer) -> Callable[[list[int]], int]:
    """Any allowed token but what xgrammar allows and the embedded grammar does not: white space without end,
    control tokens within a JSON string, those that are spelled by ordinary ones, and halves of characters.
    """
    choose, control = chooser(seed, tokenizer), set(tokenizer.special_ids.values())

    def plain(token_id: int) -> bool:
        return not re.search(r"[\s<\ufffd]", tokenizer.decode([token_id]))

    def choose_modestly(allowed: list[int]) -> int:
        is_in_string = len(control.intersection(allowed)) > 2
        modest = [i for i in allowed if (not is_in_string if i in control else plain(i))]
        return choose(modest or allowed)

    return choose_modestly


def said(tokenizer: ModelTokenizer, answer: list[int]) -> str:
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
def test_both_take_the_same_answers(
    name: str, answer: str, taken: bool, forms: XgrammarForms, grammars: Grammars
) -> None:
    token_ids = ModelTokenizer.load(DEMO).encode_text(answer, allow_special=True)
    matcher = asyncio.run(grammars.matcher(FORMS[name]))

    assert forms.takes(FORMS[name], token_ids) is taken
    assert (matcher.allowed(token_ids, 0) is None and matcher.error is None) is taken


def test_a_schema_is_written_once() -> None:
    assert structural_tag(FORMS["one call is demanded"]).count('"required"') == 1


def test_a_schema_that_is_none_or_a_leading_messages_is_refused() -> None:
    message = MessageForm(headers=("x",), end="<|return|>", schema="[]", param="p")

    with pytest.raises(InvalidRequest, match="`p` is no schema"):
        structural_tag(Guided(last=(message,)))
    with pytest.raises(InvalidRequest, match="leading message"):
        structural_tag(Guided(leading=(message,), last=(msgspec.structs.replace(message, schema="{}"),)))
