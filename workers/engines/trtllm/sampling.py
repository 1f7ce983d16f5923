"""Converts a request's Sampling to TensorRT-LLM's SamplingParams."""

from typing import Any

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Sampling
from baton.structural_tag import structural_tag
from workers.engines.library.model_facts import ModelFacts
from workers.engines.trtllm import library
from workers.engines.trtllm.library import Library


def sampling_params(request: GenerateRequest, lib: Library, facts: ModelFacts, *, max_tokens: int) -> Any:
    """The SamplingParams of one attempt. Raises InvalidRequest for what this build does not support.

    For a resumed answer, `max_tokens` and `min_tokens` are what is left, and its existing tokens count as
    generated in the penalties. It continues exactly only if it is greedy: TensorRT-LLM's sampling is not
    positional, so its random numbers differ from the first attempt's."""
    sampling = request.sampling
    stops = () if sampling.ignore_eos else sampling.stop_token_ids
    params = {
        "max_tokens": max_tokens,
        # The default is the tokenizer's, and min_tokens would apply to that one.
        "end_id": sampling.stop_token_ids[0] if sampling.stop_token_ids else facts.eos_token_id,
        "pad_id": facts.eos_token_id,
        "stop_token_ids": list(stops) or None,
        "include_stop_str_in_output": True,  # else the ids lack the stop token
        "ignore_eos": not stops,
        "detokenize": False,
        "seed": sampling.seed_of_attempt(request.num_generated),
        **_choosing(sampling),
        **_penalties(request),
    }
    if (min_tokens := sampling.min_tokens - request.num_generated) > 0:
        params["min_tokens"] = min(min_tokens, max_tokens)
    if sampling.logprobs is not None:
        params["logprobs"] = max(1, sampling.logprobs)  # 0 would omit the chosen token's, too
    if sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "TensorRT-LLM workers do not return log probabilities of the prompt.", param="echo"
        )
    if sampling.logit_bias:
        params["embedding_bias"] = library.embedding_bias(sampling.logit_bias, facts.vocab_size)
    if sampling.guided is not None:
        tag = structural_tag(sampling.guided, facts.control_ids)
        params["guided_decoding"] = lib.guided_decoding_params(structural_tag=tag)
    try:
        return lib.sampling_params(**params)
    except (ValueError, TypeError, NotImplementedError) as error:  # TypeError: this build lacks a parameter
        raise InvalidRequest(f"TensorRT-LLM refuses the sampling: {error}") from error


def _choosing(sampling: Sampling) -> dict[str, object]:
    if sampling.temperature == 0 or sampling.top_p == 0:
        return {}  # unset is greedy in every build, zeros only in newer ones
    params: dict[str, object] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    params["top_k"] = max(0, sampling.top_k)  # 0 is off; -1 is refused
    if sampling.min_p:
        params["min_p"] = sampling.min_p
    return params


def _penalties(request: GenerateRequest) -> dict[str, object]:
    sampling = request.sampling
    params: dict[str, object] = {}
    if sampling.repetition_penalty != 1.0:
        params["repetition_penalty"] = sampling.repetition_penalty
    if sampling.frequency_penalty or sampling.presence_penalty:
        params["frequency_penalty"] = sampling.frequency_penalty
        params["presence_penalty"] = sampling.presence_penalty
        # Else the prompt would be penalised, too.
        params["prompt_ignore_length"] = len(request.token_ids) - request.num_generated
    return params
