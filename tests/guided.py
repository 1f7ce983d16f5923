"""JSON schemas for guided decoding, with generators and parsers of random answers."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from baton.errors import BatonError
from baton.messages import Guided, Syntax
from frontend.harmony.conversation import AnswerFormat, TextGrammar
from frontend.harmony.parse import HarmonyParser
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.request import guided
from tests.repairs import messages
from workers.engines.embedded.grammar import Grammars, Matcher

Json = dict[str, Any]

MAX_TOKENS = 2000
CASES: dict[str, Json] = {
    "enum": {"enum": ["red", 'gr"ün', 3, None, {"a": [1]}]},
    "nested": {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"const": "x"}}, "required": ["b"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"enum": [1, 2]}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "array": {
        "type": "array",
        "items": {"type": "integer", "minimum": -5, "maximum": 12},
        "minItems": 2,
        "maxItems": 4,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"const": 1}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "number": {"type": "number", "minimum": -0.5, "exclusiveMaximum": 1.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "string": {"type": "string", "minLength": 2, "maxLength": 8},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
    "format": {"type": "string", "format": "date"},
    "any_of": {
        "anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "boolean"}, {"const": "none"}]
    },
    "nullable": {"type": ["string", "null"], "maxLength": 5},
    "all_of": {
        "allOf": [{"properties": {"a": {"type": "integer", "minimum": 1}}}, {"required": ["a"]}],
        "type": "object",
        "properties": {"a": {"maximum": 3}},
        "additionalProperties": False,
    },
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"kids": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/tree"}}},
                "required": ["kids"],
                "additionalProperties": False,
            }
        },
    },
}

# Each of these kept the library busy for 8 s or more, or overflowed its stack.
ENDLESS: dict[str, Json] = {
    "slow": {"type": "integer", "multipleOf": 1000003},
    "patterns": {"type": "object", "patternProperties": {f"^a{i:04}.*$": {} for i in range(1000)}},
    "deep": {
        "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)} | {"a3000": {}},
        "$ref": "#/$defs/a0",
    },
    "many ways": {
        "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}} for _ in range(1500)]}},
        "$ref": "#/$defs/a",
    },
}

BOUNDS = st.integers(-30, 30)
LEAVES = st.one_of(
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.text(max_size=4) | BOUNDS | st.none(), min_size=1, max_size=4),
    ),
    st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)}, BOUNDS, BOUNDS),
    st.builds(lambda a, b: {"type": "number", "minimum": min(a, b), "maximum": max(a, b)}, BOUNDS, BOUNDS),
    st.builds(
        lambda n, m: {"type": "string", "minLength": n, "maxLength": n + m},
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
            {"type": "string", "pattern": "^[a-c]{1,3}$"},
        ]
    ),
)


def _object(properties: Json, num_required: int) -> Json:
    required = sorted(properties)[:num_required]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(st.text(max_size=5), inner, max_size=4), st.integers(0, 4)),
        st.builds(
            lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 3)
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)


async def allowed_after(
    matcher: Matcher, token_ids: list[int], num_prompt: int = 0
) -> npt.NDArray[np.bool_] | None:
    await matcher.follow(token_ids, num_prompt)
    return matcher.allowed


async def answer_of(grammars: Grammars, form: Guided, choose: Callable[[list[int]], int]) -> list[int]:
    """An answer whose tokens `choose` picks among the allowed ones; cut after MAX_TOKENS."""
    matcher = await grammars.matcher(form)
    prompt, answer = [5, 6, 7], list[int]()
    while len(answer) < MAX_TOKENS:
        mask = await allowed_after(matcher, prompt + answer, len(prompt))
        assert matcher.error is None
        if mask is None:
            return answer
        answer.append(choose(np.flatnonzero(mask).tolist()))
    return answer


def chooser(seed: int, ends: ModelTokenizer) -> Callable[[list[int]], int]:
    """Any allowed token, but half of the time one that closes something, so that answers end."""
    rng = random.Random(seed)
    closing = {*ends.special_ids.values(), *(i for text in '"}],' for i in ends.encode_text(text))}

    def choose(allowed: list[int]) -> int:
        likely = [token_id for token_id in allowed if token_id in closing]
        return rng.choice(likely if likely and rng.random() < 0.5 else allowed)

    return choose


def parts_of(
    tokenizer: ModelTokenizer, answer: list[int], offered: set[str]
) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, text, calls with their arguments), as the client would get them."""
    parser = HarmonyParser(tokenizer.vocabulary, frozenset(offered))
    deltas = parser.feed(answer) + parser.finish()
    assert not parser.repairs
    found = messages(deltas)
    reasoning = "".join(each.get("reasoning", "") for each in found)
    text = "".join(each.get("text", "") + each.get("preamble", "") for each in found)
    calls = [(each["call"], each["arguments"]) for each in found if "call" in each]
    return reasoning, text, calls


def check(schema: Json, text: str) -> None:
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def answer_form(schema: Json, *, strict: bool = True) -> Guided:
    form = guided([], answer=AnswerFormat(schema=schema, strict=strict))
    assert form is not None
    return form


def text_form(syntax: Syntax, text: str) -> Guided:
    grammar = TextGrammar(syntax=syntax, text=text, path="p")
    form = guided([], answer=AnswerFormat(schema=None, grammar=grammar, path="p"))
    assert form is not None
    return form


def slow_inside() -> Json:
    """A schema that compiles at once, but takes the library minutes for the mask after `"b":`."""
    many = ENDLESS["many ways"]
    return {
        "$defs": many["$defs"],
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"$ref": "#/$defs/a"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }


class ScriptedMatcher(Matcher):
    """In place of a matcher: allows every token, `late_s` after the call, or fails with `fails_with`."""

    def __init__(self, late_s: float = 0.0, fails_with: BatonError | None = None) -> None:
        none: Any = None
        super().__init__(none, none, vocab_size=8)
        self.followed: list[list[int]] = []
        self._late_s = late_s
        self._fails_with = fails_with

    def follow(self, token_ids: Sequence[int], num_prompt: int) -> "asyncio.Future[None]":
        self.followed.append(list(token_ids[num_prompt:]))
        self.is_ready = False
        return asyncio.ensure_future(self._follow_late())

    async def _follow_late(self) -> None:
        await asyncio.sleep(self._late_s)
        self.is_ready, self.error = True, self._fails_with
