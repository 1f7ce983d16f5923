"""Converts a request's Sampling to vLLM's SamplingParams."""

from typing import Any

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Sampling
from baton.structural_tag import structural_tag
from workers.engines.library.model_facts import ModelFacts
from workers.engines.vllm.library import Library

_SAME = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logprobs", "prompt_logprobs",
)  # fmt: skip


def sampling_params(
    request: GenerateRequest,
    lib: Library,
    facts: ModelFacts,
    *,
    max_tokens: int,
    transfer: dict[str, Any] | None = None,
    is_positional: bool = False,
) -> Any:
    """The SamplingParams of one attempt; `transfer` are NIXL's parameters. Raises InvalidRequest.

    For a resumed answer, `max_tokens` and `min_tokens` are what is left. vLLM's frequency and presence
    penalties ignore the existing tokens. `is_positional`: what a seed draws depends on a token's place."""
    sampling = request.sampling
    params = {name: getattr(sampling, name) for name in _SAME} | {
        "max_tokens": max_tokens,
        "min_tokens": min(max_tokens, max(0, sampling.min_tokens - request.num_generated)),
        "seed": sampling.seed_of_attempt(0 if is_positional else request.num_generated),
        "top_k": max(0, sampling.top_k),
        "logit_bias": sampling.logit_bias or None,
        # Only the request's stop tokens end it; vLLM's own end token is the model's.
        "ignore_eos": True,
        "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_token_ids),
        "detokenize": False,
        "output_kind": lib.delta,
    }
    if transfer is not None:
        params["extra_args"] = {"kv_transfer_params": transfer}
    if sampling.guided is not None:
        tag = structural_tag(sampling.guided, facts.control_ids)
        # `min_tokens` would forbid the end even where the form allows nothing else.
        params |= {"structured_outputs": lib.structured_outputs(structural_tag=tag), "min_tokens": 0}
    try:
        return lib.sampling_params(**params)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"vLLM refuses the sampling: {error}") from error


def is_continued_exactly(sampling: Sampling, *, is_positional: bool) -> bool:
    """Whether an answer that prefill began can be continued as if one worker had sampled all of it: nothing
    counts generated tokens from the first one, and a seed that the client chose is not used anew."""
    is_counted = sampling.guided is not None or sampling.frequency_penalty or sampling.presence_penalty
    is_drawn_anew = sampling.is_seeded and sampling.temperature and not is_positional
    return not is_counted and sampling.prompt_logprobs is None and not is_drawn_anew
