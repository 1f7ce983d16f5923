"""From a request's Sampling to TensorRT-LLM's SamplingParams."""

import dataclasses
from collections.abc import Callable
from typing import Any

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Sampling
from workers.engines.model_facts import ModelFacts
from workers.engines.structural_tag import structural_tag
from workers.engines.token_requests import seed_of_attempt
from workers.engines.trtllm import library
from workers.engines.trtllm.library import Library


def sampling_params(request: GenerateRequest, lib: Library, facts: ModelFacts, *, max_tokens: int) -> Any:
    """The SamplingParams of one attempt. Raises InvalidRequest for what this build cannot do.

    Of an answer that is resumed, `max_tokens` and `min_tokens` are what is left, and the tokens that exist
    count as generated in the penalties. Its random numbers are others than those of the first attempt:
    TensorRT-LLM's sampling is not positional, so a resumed answer goes on exactly only if it is greedy.
    """
    asked = request.sampling
    stops = () if asked.ignore_eos else asked.stop_token_ids
    params = {
        "max_tokens": max_tokens,
        # Without `end_id` it would take the tokenizer's, and min_tokens would hold for that one.
        "end_id": asked.stop_token_ids[0] if asked.stop_token_ids else facts.eos_token_id,
        "pad_id": facts.eos_token_id,
        "stop_token_ids": list(stops) or None,
        "include_stop_str_in_output": True,  # else the stop token would be cut off the ids
        "ignore_eos": not stops,
        "detokenize": False,
        "seed": seed_of_attempt(asked, request.num_generated),
        **_choosing(asked),
        **_penalties(request),
    }
    if (min_tokens := asked.min_tokens - request.num_generated) > 0:
        params["min_tokens"] = min(min_tokens, max_tokens)
    if asked.logprobs is not None:
        params["logprobs"] = max(1, asked.logprobs)  # 0 would leave out the chosen token's, too
    if asked.prompt_logprobs is not None:
        raise InvalidRequest("TensorRT-LLM workers give no log probabilities of the prompt.", param="echo")
    if asked.logit_bias:
        params["embedding_bias"] = library.embedding_bias(asked.logit_bias, facts.vocab_size)
    if asked.guided is not None:
        tag = structural_tag(asked.guided, facts.control_ids)
        params["guided_decoding"] = lib.guided_decoding_params(structural_tag=tag)
    return _built(lib.sampling_params, params)


def _choosing(asked: Sampling) -> dict[str, object]:
    if asked.temperature == 0 or asked.top_p == 0:
        return {}  # nothing set is greedy in every build; these only in newer ones
    params: dict[str, object] = {"temperature": asked.temperature, "top_p": asked.top_p}
    params["top_k"] = max(0, asked.top_k)  # 0 is off; -1 is refused
    if asked.min_p:
        params["min_p"] = asked.min_p
    return params


def _penalties(request: GenerateRequest) -> dict[str, object]:
    asked = request.sampling
    params: dict[str, object] = {}
    if asked.repetition_penalty != 1.0:
        params["repetition_penalty"] = asked.repetition_penalty
    if asked.frequency_penalty or asked.presence_penalty:
        params["frequency_penalty"] = asked.frequency_penalty
        params["presence_penalty"] = asked.presence_penalty
        # Else the prompt would be penalised, too.
        params["prompt_ignore_length"] = len(request.token_ids) - request.num_generated
    return params


def _built(cls: Callable[..., Any], params: dict[str, object]) -> Any:
    lacking = sorted(set(params) - {field.name for field in dataclasses.fields(cls)})  # type: ignore[arg-type]  # it is one
    if lacking:
        raise InvalidRequest(f"this build of TensorRT-LLM cannot do {', '.join(lacking)}", param=lacking[0])
    try:
        return cls(**params)
    except (ValueError, NotImplementedError) as error:
        raise InvalidRequest(f"TensorRT-LLM refuses the sampling: {error}") from error
