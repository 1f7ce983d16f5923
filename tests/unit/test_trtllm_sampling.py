"""Requests in TensorRT-LLM's terms, and what is refused before it can do harm."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tensorrt_llm import SamplingParams

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Guided, MessageForm
from baton.structural_tag import structural_tag
from tests.requests import token_request
from workers.engines.library.model_facts import read_model_facts
from workers.engines.requests import num_left
from workers.engines.trtllm.library import load_library
from workers.engines.trtllm.sampling import sampling_params

FACTS = read_model_facts(Path("models/demo"))
CONTEXT_LENGTH = 100
STOPS = (3070, 3071)


def ask(num_tokens: int = 5, **options: Any) -> GenerateRequest:
    defaults: dict[str, Any] = {"max_tokens": 10, "seed": 3, "stop_token_ids": STOPS}
    return token_request([1] * num_tokens, **defaults | options)


def params(request: GenerateRequest) -> dict[str, Any]:
    """The fields that differ from TensorRT-LLM's defaults."""
    built = sampling_params(request, load_library(), FACTS, max_tokens=num_left(request, CONTEXT_LENGTH))
    return {
        field.name: value
        for field in dataclasses.fields(built)
        if (value := getattr(built, field.name)) is not None and value != field.default
    }


ALWAYS = {
    "max_tokens": 10,
    "end_id": STOPS[0],
    "pad_id": FACTS.eos_token_id,
    "stop_token_ids": list(STOPS),
    "include_stop_str_in_output": True,
    "detokenize": False,
    "seed": 3,
}


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, {}),
        ({"temperature": 1.0}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0}),
        ({"temperature": 0.5, "top_k": -1}, {"temperature": 0.5, "top_p": 1.0, "top_k": 0}),
        (
            {"temperature": 0.5, "top_k": 7, "min_p": 0.1},
            {"temperature": 0.5, "top_p": 1.0, "top_k": 7, "min_p": 0.1},
        ),
        ({"temperature": 0.0, "logprobs": 0}, {"logprobs": 1}),
        ({"temperature": 0.0, "logprobs": 4}, {"logprobs": 4}),
        ({"temperature": 0.0, "min_tokens": 4}, {"min_tokens": 4}),
        ({"temperature": 0.5, "top_p": 0.0}, {}),
        ({"temperature": 0.0, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        (
            {"temperature": 0.0, "frequency_penalty": 0.5},
            {"frequency_penalty": 0.5, "presence_penalty": 0.0, "prompt_ignore_length": 5},
        ),
        (
            {"temperature": 0.0, "presence_penalty": 0.5},
            {"frequency_penalty": 0.0, "presence_penalty": 0.5, "prompt_ignore_length": 5},
        ),
    ],
)
def test_each_setting_is_translated(asked: dict[str, Any], sent: dict[str, Any]) -> None:
    assert params(ask(**asked)) == ALWAYS | sent


@pytest.mark.parametrize(
    ("asked", "end_id"), [({"stop_token_ids": ()}, FACTS.eos_token_id), ({"ignore_eos": True}, STOPS[0])]
)
def test_a_request_that_no_token_stops_ends_at_max_tokens_only(asked: dict[str, Any], end_id: int) -> None:
    sent = params(ask(temperature=0.0, **asked))
    assert sent["ignore_eos"]
    assert sent["end_id"] == end_id
    assert "stop_token_ids" not in sent


def test_a_resumed_answer_asks_for_the_rest() -> None:
    request = ask(9, num_generated=4, min_tokens=6, frequency_penalty=1.0, temperature=0.0)
    sent = params(request)
    assert sent["seed"] == request.sampling.seed_of_attempt(4) != 3
    assert (sent["max_tokens"], sent["min_tokens"], sent["prompt_ignore_length"]) == (6, 2, 5)
    assert "min_tokens" not in params(ask(9, num_generated=4, min_tokens=3))
    assert params(ask(9, num_generated=4, min_tokens=50))["min_tokens"] == sent["max_tokens"]


def test_logit_bias_is_a_tensor_over_the_vocabulary() -> None:
    bias = params(ask(logit_bias={7: -100.0}))["embedding_bias"]
    assert bias.shape == (FACTS.vocab_size,)
    assert (float(bias[7]), float(bias.abs().sum())) == (-100.0, 100.0)


def test_a_form_becomes_a_structural_tag() -> None:
    form = Guided(last=(MessageForm(headers=("<|channel|>final<|message|>",), end="<|return|>"),))
    tag = params(ask(guided=form))["guided_decoding"].structural_tag
    assert tag == structural_tag(form, FACTS.control_ids)


def test_the_prompts_logprobs_are_refused_by_the_clients_field() -> None:
    with pytest.raises(InvalidRequest) as refused:
        params(ask(prompt_logprobs=0, max_tokens=1))
    assert refused.value.param == "echo"


def test_sampling_that_a_release_refuses_or_lacks_is_the_clients_fault() -> None:
    @dataclasses.dataclass
    class Unfinished(SamplingParams):  # type: ignore[misc]  # the double is not typed
        def __post_init__(self) -> None:
            raise NotImplementedError("no beams")

    lib, older = load_library(), dataclasses.make_dataclass("Old", [("max_tokens", int)])
    for cls in (Unfinished, older, lib.sampling_params):
        build = dataclasses.replace(lib, sampling_params=cls)
        with pytest.raises(InvalidRequest):
            sampling_params(ask(top_p=1.5), build, FACTS, max_tokens=1)
