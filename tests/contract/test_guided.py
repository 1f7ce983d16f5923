"""The guided decoding contract: an engine enforces a form wherever the answer runs, or refuses it."""

import asyncio
import functools
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Guided, Role, TokenChunk
from frontend.harmony.conversation import Conversation, Tool, UserTurn
from frontend.text.tokenizer import ModelTokenizer, SpecialToken
from frontend.turn.request import CallChoice, guided
from tests.engine_calls import chunks, handed_over, running
from tests.guided import CASES, ENDLESS, answer_form, check, parts_of, slow_inside
from tests.requests import token_request
from tests.scripted_frontend import prompt_ids
from workers.engine import Engine
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.settings import EmbeddedSettings, KvCacheSettings
from workers.kv.transceiver import choose_transceiver

DEMO = Path("models/demo")
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "top_p": 0.95}
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])


def embedded() -> Engine:
    settings = EmbeddedSettings(
        max_batch_size=8, max_num_tokens=64, kv_cache_config=KvCacheSettings(max_tokens=8192)
    )
    return EmbeddedEngine(settings, model_path=DEMO, transceiver=choose_transceiver("TCP"))


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(DEMO)


@pytest.fixture(scope="module")
def prompt(tokenizer: ModelTokenizer) -> list[int]:
    talk = Conversation(turns=(UserTurn("Is everything up and running?"),), reasoning_effort="low")
    return prompt_ids(talk, tokenizer)


def started(num_engines: int = 1) -> AbstractAsyncContextManager[list[Engine]]:
    return running(*(embedded() for _ in range(num_engines)))


@functools.cache
def stop_token_ids() -> tuple[int, ...]:
    return ModelTokenizer.load(DEMO).stop_token_ids


def ask(token_ids: list[int], form: Guided | None, **options: Any) -> GenerateRequest:
    """A request for up to 250 tokens; `options` set its sampling, or `num_generated`."""
    defaults: dict[str, Any] = {"max_tokens": 250, "stop_token_ids": stop_token_ids()}
    return token_request(token_ids, **defaults | options, guided=form)


def direct(form: Guided | None) -> Guided:
    """The form without reasoning, which has no bound: the demo model may reason beyond any `max_tokens`."""
    assert form is not None
    return msgspec.structs.replace(form, leading=())


def tokens(answer: list[TokenChunk]) -> list[int]:
    return [token_id for chunk in answer for token_id in chunk.token_ids]


async def alone(engine: Engine, request: GenerateRequest) -> list[int]:
    return tokens(await chunks(engine.decode(request)))


async def disaggregated(prefill: Engine, decode: Engine, request: GenerateRequest) -> list[int]:
    async with handed_over(prefill, request) as handoff:
        return await alone(decode, msgspec.structs.replace(request, handoff=handoff))


@SAMPLINGS
@pytest.mark.parametrize("case", ["array", "optional"])
async def test_the_answer_has_its_form_on_one_worker_or_two(
    case: str, sampling: dict[str, Any], tokenizer: ModelTokenizer, prompt: list[int]
) -> None:
    async with started(2) as (prefill, decode):
        request = ask(prompt, direct(answer_form(CASES[case])), **sampling)
        answer = await alone(decode, request)
        assert answer[-1] == tokenizer.special_ids[SpecialToken.RETURN]
        check(CASES[case], parts_of(tokenizer, answer, set())[1])
        assert await disaggregated(prefill, decode, request) == answer


@SAMPLINGS
async def test_a_demanded_call_is_made(
    sampling: dict[str, Any], tokenizer: ModelTokenizer, prompt: list[int]
) -> None:
    form = guided(
        [Tool(name="f", parameters=CASES["optional"]), Tool(name="g")],
        CallChoice(must_call=True, names=frozenset({"f"})),
    )
    async with started(2) as (prefill, decode):
        answer = await disaggregated(prefill, decode, ask(prompt, direct(form), **sampling))
        assert answer[-1] == tokenizer.special_ids[SpecialToken.CALL]
        _, text, [(name, arguments)] = parts_of(tokenizer, answer, {"f", "g"})
        assert (text, name) == ("", "f")
        check(CASES["optional"], arguments)


@SAMPLINGS
async def test_a_resumed_answer_goes_on_exactly(sampling: dict[str, Any], prompt: list[int]) -> None:
    async with started(2) as (prefill, decode):
        form = answer_form(CASES["nested"])
        whole = await alone(decode, ask(prompt, form, **sampling))
        for num_generated in (len(whole) // 2, len(whole) - 2):
            so_far = prompt + whole[:num_generated]
            rest = ask(so_far, form, num_generated=num_generated, **sampling)
            assert whole[:num_generated] + await alone(decode, rest) == whole
            assert whole[:num_generated] + await disaggregated(prefill, decode, rest) == whole


async def test_guided_and_free_answers_run_side_by_side(prompt: list[int]) -> None:
    forms = [None, answer_form(CASES["nested"]), None, answer_form(CASES["array"])]
    requests = [ask(prompt, form, **SEEDED) for form in forms]
    async with started() as (engine,):
        expected = [await alone(engine, request) for request in requests]
        assert await asyncio.gather(*[alone(engine, request) for request in requests]) == expected


async def test_min_tokens_yields_to_the_form_and_logprobs_stay_the_models_own(
    tokenizer: ModelTokenizer, prompt: list[int]
) -> None:
    async with started() as (engine,):
        request = ask(prompt, direct(answer_form({"const": 1})), **GREEDY, min_tokens=240, logprobs=0)
        answer = await chunks(engine.decode(request))
        assert answer[-1].finish_reason == "stop"
        assert json.loads(parts_of(tokenizer, tokens(answer), set())[1]) == 1
        entries = [entry for chunk in answer for entry in chunk.logprobs or ()]
        assert min(entry.logprob for entry in entries) < -1  # the model alone would not have said 1
        assert all(entry.logprob <= 0 for entry in entries)


async def test_nothing_is_held_to_the_form_after_its_end(
    tokenizer: ModelTokenizer, prompt: list[int]
) -> None:
    async with started() as (engine,):
        form = direct(answer_form({"const": 1}))
        short = await alone(engine, ask(prompt, form, **GREEDY))
        long = await chunks(engine.decode(ask(prompt, form, **GREEDY, max_tokens=100, ignore_eos=True)))
        assert tokens(long)[: len(short)] == short
        assert (long[-1].finish_reason, len(tokens(long))) == ("length", 100)


@pytest.mark.parametrize("role", Role)
async def test_what_cannot_be_enforced_is_refused_with_its_field(role: Role, prompt: list[int]) -> None:
    async with started() as (engine,):
        request = ask(prompt, answer_form({"not": {}}))
        run = engine.prefill(request) if role is Role.PREFILL else engine.decode(request)
        with pytest.raises(InvalidRequest, match="not") as caught:
            await chunks(run)
        assert caught.value.param == "response_format"


async def test_a_resumed_answer_without_the_form_fails_alone(prompt: list[int]) -> None:
    async with started() as (engine,):
        neighbour = ask(prompt, answer_form(CASES["nested"]), **SEEDED)
        expected = await alone(engine, neighbour)
        wrong = ask([*prompt, 1, 2, 3], answer_form({"const": 1}), num_generated=3)
        running = asyncio.create_task(alone(engine, neighbour))
        with pytest.raises(InvalidRequest):
            await alone(engine, wrong)
        assert await running == expected


async def test_a_schema_that_takes_too_long_keeps_no_other_request_waiting(prompt: list[int]) -> None:
    other = ask(prompt, direct(answer_form(CASES["optional"])), **SEEDED, max_tokens=10)
    async with started() as (engine,):
        expected = await alone(engine, other)
        slow = asyncio.create_task(alone(engine, ask(prompt, answer_form(ENDLESS["slow"]))))
        await asyncio.sleep(0)  # it is on its way
        assert await alone(engine, other) == expected
        with pytest.raises(InvalidRequest, match="CPU time") as caught:
            await slow
        assert caught.value.param == "response_format"


async def test_an_answer_whose_next_step_takes_too_long_keeps_no_other_waiting(
    tokenizer: ModelTokenizer, prompt: list[int]
) -> None:
    head = tokenizer.encode_text('<|channel|>final<|message|>{"a":1,"b":', allow_special=True)
    other = ask(prompt, direct(answer_form(CASES["optional"])), **SEEDED, max_tokens=10)
    request = ask([*prompt, *head], answer_form(slow_inside()), num_generated=len(head))
    async with started() as (engine,):
        expected = await alone(engine, other)
        slow = asyncio.create_task(alone(engine, request))
        await asyncio.sleep(0)  # it is on its way
        assert await alone(engine, other) == expected
        with pytest.raises(InvalidRequest, match="CPU time"):
            await slow
