"""A body's sampling fields as token requests: defaults, limits, whose word counts when two speak."""

from typing import Any

import msgspec
import pytest

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Sampling
from frontend.text.tokenizer import ServedModel
from frontend.turn.fields import CommonFields
from frontend.turn.request import Client, TurnRequest, prepare, sampling_of
from frontend.turn.thoughts import Thoughts
from tests.scripted_frontend import TOKENIZER

SERVED = ServedModel("m", 100, TOKENIZER, "2026-11-21")
LAST_ID = TOKENIZER.vocab_size - 1


def asked(fields: dict[str, Any], *prompts: str | list[int], **more: Any) -> TurnRequest:
    common = msgspec.convert({"model": "alias", **fields}, CommonFields)
    return TurnRequest(fields=common, prompt=prompts or ("x",), path="prompt", num_bytes=1, **more)


def sampling(
    num_prompt_tokens: int = 10, max_tokens: int | None = None, logprobs: int | None = None, **fields: Any
) -> Sampling:
    return sampling_of(asked(fields, max_tokens=max_tokens, logprobs=logprobs), SERVED, num_prompt_tokens)


def test_without_fields_the_answer_is_sampled_plainly_and_may_fill_the_context() -> None:
    plain = sampling()
    stops = tuple(TOKENIZER.stop_token_ids)
    assert plain == Sampling(max_tokens=90, seed=plain.seed, stop_token_ids=stops)
    assert len({sampling().seed for _ in range(20)}) == 20


def test_every_field_is_passed_on() -> None:
    fields: dict[str, Any] = {
        "min_tokens": 3, "seed": 5, "temperature": 0.7, "top_p": 0.5, "top_k": 9, "min_p": 0.1,
        "frequency_penalty": 0.2, "presence_penalty": 0.3, "repetition_penalty": 1.1, "ignore_eos": True,
    }  # fmt: skip
    made = sampling(max_tokens=20, logprobs=2, logit_bias={"0": 1.5, str(LAST_ID): -2}, **fields)
    expected = Sampling(
        max_tokens=20, logprobs=2, is_seeded=True, stop_token_ids=made.stop_token_ids,
        logit_bias={0: 1.5, LAST_ID: -2}, **fields,
    )  # fmt: skip
    assert made == expected


STOPS = tuple(TOKENIZER.stop_token_ids)


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({"top_p": 0}, {"temperature": 0, "top_p": 1}),
        ({"temperature": 0}, {"temperature": 0, "top_p": 1}),
        ({"nvext": {"greed_sampling": True}, "top_p": 0.5}, {"temperature": 0}),
        (
            {"nvext": {"top_k": 3, "repetition_penalty": 1.3, "ignore_eos": False}, "top_k": 7,
             "repetition_penalty": 1.7, "ignore_eos": True},
            {"top_k": 3, "repetition_penalty": 1.3, "ignore_eos": False},
        ),
        ({"nvext": {}, "top_k": 7}, {"top_k": 7}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({}, {"is_seeded": False}),
        ({"seed": 0}, {"seed": 0, "is_seeded": True}),
        ({"seed": -1}, {"seed": 2**63 - 1}),
        ({"seed": -(2**63)}, {"seed": 0}),
        ({"stop_token_ids": [7, STOPS[0], 7]}, {"stop_token_ids": (*STOPS, 7)}),
        ({"max_tokens": 91}, {"max_tokens": 90}),
        ({"max_tokens": 90}, {"max_tokens": 90}),
        ({"max_tokens": 5, "min_tokens": 5}, {"max_tokens": 5, "min_tokens": 5}),
        ({"num_prompt_tokens": 99}, {"max_tokens": 1}),
    ],
)  # fmt: skip
def test_sampling_is_resolved_within_what_the_context_leaves(
    fields: dict[str, Any], made: dict[str, Any]
) -> None:
    sampled = sampling(**fields)
    assert {name: getattr(sampled, name) for name in made} == made


async def made(request: TurnRequest) -> list[GenerateRequest]:
    client = Client(request_id="r", deadline_s=7.0, owner="key")
    choices = await prepare(request, client, SERVED, Thoughts(), lambda *_: None, max_choices=4)
    return [choice.request for choice in choices]


async def test_each_choice_of_each_prompt_is_a_request_of_its_own() -> None:
    requests = await made(asked({"priority": -5}, [1], [2], num_choices=2))
    assert [(r.request_id, r.token_ids, r.sampling.choice) for r in requests] == [
        ("r-0", [1], 0), ("r-1", [1], 1), ("r-2", [2], 0), ("r-3", [2], 1),
    ]  # fmt: skip
    assert {(r.model, r.deadline_s, r.priority) for r in requests} == {("m", 7.0, -5)}
    (request,) = await made(asked({}, [1]))
    assert (request.request_id, request.priority) == ("r", 0)


async def test_the_longest_prompt_leaves_the_room_of_all_answers() -> None:
    assert {r.sampling.max_tokens for r in await made(asked({}, [1], [1] * 60, [1]))} == {40}


def test_prompts_of_8192_tokens_can_be_scored_and_longer_ones_not() -> None:
    served = ServedModel("m", 10_000, TOKENIZER, "2026-11-21")
    scored = asked({}, prompt_logprobs=0)
    assert sampling_of(scored, served, 8192).prompt_logprobs == 0
    with pytest.raises(InvalidRequest, match="limited to prompts of 8192 tokens"):
        sampling_of(scored, served, 8193)
