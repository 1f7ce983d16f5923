"""Requests in vLLM's terms, and the chunks made of vLLM's outputs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from workers.engines.vllm.chunker import Chunker
from workers.engines.vllm.handoff import KEEP, num_blocks

from baton.errors import EngineFailure, HandoffFailed, InvalidRequest, WorkerLost
from baton.messages import GenerateRequest, Guided, KvHandoff, MessageForm, Sampling, Usage
from workers.engines.library.model_facts import read_model_facts
from workers.engines.library.requests import seed_of_attempt
from workers.engines.library.structural_tag import structural_tag
from workers.engines.vllm.library import load_library
from workers.engines.vllm.sampling import is_continued_exactly, sampling_params

FACTS = read_model_facts(Path("models/demo"))
STOPS = (3071, 3070)


def ask(num_generated: int = 0, **options: Any) -> GenerateRequest:
    sampling: dict[str, Any] = {"max_tokens": 10, "seed": 3, "stop_token_ids": STOPS} | options
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=[1] * 5,
        handoff=sampling.pop("handoff", None),
        sampling=Sampling(**sampling),
        deadline_s=1,
        num_generated=num_generated,
    )


def params(request: GenerateRequest, **told: Any) -> dict[str, Any]:
    """The fields that differ from vLLM's defaults."""
    built = sampling_params(request, load_library(), FACTS, **{"max_tokens": 10} | told)
    plain = SamplingParams()
    return {name: value for name, value in vars(built).items() if value != getattr(plain, name)}


ALWAYS = {
    "max_tokens": 10,
    "seed": 3,
    "ignore_eos": True,
    "stop_token_ids": list(STOPS),
    "detokenize": False,
    "output_kind": RequestOutputKind.DELTA,
}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, {}),
        ({"temperature": 0.5, "top_k": -1, "top_p": 0.5}, {"temperature": 0.5, "top_p": 0.5}),
        ({"top_k": 7, "min_p": 0.1}, {"top_k": 7, "min_p": 0.1}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}),
        ({"logit_bias": {3: 1.5}}, {"logit_bias": {3: 1.5}}),
        ({"min_tokens": 4}, {"min_tokens": 4}),
        ({"ignore_eos": True}, {"stop_token_ids": []}),
        (
            {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5},
            {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5},
        ),
    ],
)
def test_sampling_is_translated_for_vllm(asked: dict[str, Any], told: dict[str, Any]) -> None:
    expected = {name: value for name, value in (ALWAYS | told).items() if value != []}
    assert params(ask(**asked)) == expected


def test_a_resumed_answer_asks_vllm_for_the_rest() -> None:
    request = ask(num_generated=3, min_tokens=5)

    told = params(request, max_tokens=7)

    assert (told["max_tokens"], told["min_tokens"]) == (7, 2)
    assert told["seed"] == seed_of_attempt(request.sampling, 3) != 3
    assert params(request, is_positional=True)["seed"] == 3  # of token 4, whose place counts anyway


@pytest.mark.parametrize(
    ("asked", "exactly", "exactly_by_place"),
    [
        ({}, True, True),
        ({"temperature": 1.0}, True, True),
        ({"temperature": 1.0, "is_seeded": True}, False, True),
        ({"temperature": 0.0, "is_seeded": True}, True, True),
        ({"frequency_penalty": 0.1}, False, False),
        ({"presence_penalty": 0.1}, False, False),
        ({"prompt_logprobs": 0}, False, False),
        ({"guided": Guided(last=(MessageForm(headers=("h",), end="e"),))}, False, False),
    ],
    ids=str,
)
def test_decode_goes_on_with_prefills_token_only_where_that_changes_nothing(
    asked: dict[str, Any], exactly: bool, exactly_by_place: bool
) -> None:
    sampling = ask(**asked).sampling
    assert bool(is_continued_exactly(sampling, is_positional=False)) == exactly
    assert bool(is_continued_exactly(sampling, is_positional=True)) == exactly_by_place


def test_a_prompt_that_is_handed_over_has_one_token_and_its_parameters() -> None:
    told = params(ask(min_tokens=5), max_tokens=1, transfer=dict(KEEP))

    assert (told["max_tokens"], told["min_tokens"]) == (1, 1)
    assert told["extra_args"] == {"kv_transfer_params": KEEP}


def test_a_demanded_form_becomes_a_structural_tag() -> None:
    form = Guided(
        leading=(),
        last=(MessageForm(headers=("<|channel|>final<|message|>",), end="<|return|>", grammar="{}"),),
    )

    told = params(ask(guided=form, min_tokens=5))

    assert told["structured_outputs"].structural_tag == structural_tag(form, FACTS.control_ids)
    assert "min_tokens" not in told  # the form says where the answer ends


def test_what_vllm_refuses_names_the_field() -> None:
    with pytest.raises(InvalidRequest, match=r"vLLM refuses the sampling: temperature must be in \[0, 2\]"):
        sampling_params(ask(temperature=3.0), load_library(), FACTS, max_tokens=1)


def test_a_release_without_a_parameter_refuses_the_request_alone() -> None:
    def older(*, max_tokens: int) -> None:
        """Takes one parameter."""

    lib = dataclasses.replace(load_library(), sampling_params=older)
    with pytest.raises(InvalidRequest, match="unexpected keyword argument"):
        sampling_params(ask(), lib, FACTS, max_tokens=1)


def handoff(state: bytes, num_tokens: int = 5) -> KvHandoff:
    return KvHandoff(
        worker_id="p",
        incarnation="1",
        first_token=7,
        num_prompt_tokens=num_tokens,
        ttl_s=1,
        engine_state=state,
    )


@pytest.mark.parametrize(
    ("groups", "count"), [([[1, 2], [3]], 3), (((1, 2),), 2), ([4, 5], 2), (None, 0), ([[]], 0)]
)
def test_kept_blocks_are_counted_over_all_groups_of_layers(groups: object, count: int) -> None:
    assert num_blocks({"remote_block_ids": groups}) == count


def output(reason: str | None = None, **given: Any) -> RequestOutput:
    told = {"token_ids": [8, 9], "logprobs": None} | given
    return RequestOutput("r", [CompletionOutput(0, "", finish_reason=reason, **told)], bool(reason), 4)


def test_the_first_and_the_last_output_tell_usage_over_all_attempts() -> None:
    chunker = Chunker(ask(num_generated=2))
    assert chunker.chunk(output(token_ids=[])).usage == Usage(3, 3, 2)  # which is not sent on
    assert chunker.chunk(output()).usage == Usage(3, 3, 4)
    assert chunker.chunk(output()).usage is None
    assert chunker.chunk(output("stop")).usage == Usage(3, 3, 8)


def test_a_count_of_cached_tokens_that_vllm_leaves_out_is_none() -> None:
    result = output("length")
    result.num_cached_tokens = None
    assert Chunker(ask()).chunk(result).usage == Usage(5, 0, 2)


def test_the_cached_tokens_of_a_handoff_are_those_of_prefill() -> None:
    for num_cached in (0, 1):  # not vLLM's 4, which counts what was transferred
        told = Chunker(ask(), num_cached_tokens=num_cached).chunk(output("length"))
        assert told.usage == Usage(5, num_cached, 2)


@pytest.mark.parametrize(("reason", "told"), [("error", "'error'"), ("repetition", "rep")])
def test_other_finish_reasons_are_engine_failures(reason: str, told: str) -> None:
    with pytest.raises(EngineFailure, match=told):
        Chunker(ask()).chunk(output(reason))


def test_an_engine_that_was_told_to_end_lets_another_worker_serve() -> None:
    with pytest.raises(WorkerLost):
        Chunker(ask()).chunk(output("abort"))


def test_an_error_with_a_handoff_is_the_handoffs() -> None:
    with pytest.raises(HandoffFailed):
        Chunker(ask(handoff=handoff(b""))).chunk(output("error"))


def test_an_error_after_tokens_is_not_blamed_on_the_handoff() -> None:
    chunker = Chunker(ask(handoff=handoff(b"")))
    chunker.chunk(output())

    with pytest.raises(EngineFailure):
        chunker.chunk(output("error"))


def test_logprobs_are_the_chosen_tokens_and_the_likeliest() -> None:
    told: list[dict[int, Logprob]] = [{8: Logprob(-3.0, 3), 1: Logprob(-0.5, 1), 2: Logprob(-1.0, 2)}]

    (first, second) = Chunker(ask(logprobs=2)).chunk(output(logprobs=told)).logprobs or ()

    assert (first.token_id, first.logprob, first.top) == (8, -3.0, ((1, -0.5), (2, -1.0)))
    assert (second.token_id, second.top) == (9, ())  # not reported
    (first, _) = Chunker(ask(logprobs=0)).chunk(output(logprobs=told)).logprobs or ()
    assert (first.logprob, first.top) == (-3.0, ())


def test_the_prompts_logprobs_come_with_the_end_and_without_alternatives_if_none_are_asked_for() -> None:
    chunker, begun = Chunker(ask(prompt_logprobs=0)), output()
    begun.prompt_logprobs = [
        None,
        {1: Logprob(-0.5, 1)},
        {1: Logprob(-2.0, 4), 3: Logprob(-0.1, 1)},
        None,
        {},
    ]

    assert chunker.chunk(begun).prompt_logprobs is None
    told = chunker.chunk(output("length")).prompt_logprobs

    unreported = -9999.0
    assert [entry.logprob for entry in told or ()] == [-0.5, -2.0, unreported, unreported]
    assert {(entry.token_id, entry.top) for entry in told or ()} == {(1, ())}
