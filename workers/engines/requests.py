"""What every engine of a model refuses, and how long an answer may become."""

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest


def check_request(request: GenerateRequest, vocab_size: int, context_length: int) -> None:
    """Raise InvalidRequest for what an engine would fail on, with its whole batch, or silently truncate."""
    sampling, num_tokens = request.sampling, len(request.token_ids)
    if request.num_prompt_tokens < 1:
        raise InvalidRequest("the prompt is empty")
    if num_tokens >= context_length:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens; with a context length of {context_length} "
            f"at most {context_length - 1} are allowed"
        )
    if num_left(request, context_length) < 1:
        raise InvalidRequest(
            f"max_tokens is {sampling.max_tokens}; {request.num_generated} tokens were already generated",
            param="max_tokens",
        )
    if min(request.num_generated, sampling.choice, sampling.logprobs or 0) < 0:
        raise InvalidRequest("num_generated, choice and logprobs must not be negative")
    if sampling.prompt_logprobs is not None and sampling.max_tokens > 1:
        raise InvalidRequest("prompt_logprobs need an answer of at most one token", param="max_tokens")
    token_ids = (*request.token_ids, *sampling.logit_bias, *sampling.stop_token_ids)
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"token id {token_id} is not in the model's vocabulary of {vocab_size}")


def num_left(request: GenerateRequest, context_length: int) -> int:
    """Tokens that may still be generated, within the context."""
    num_asked = request.sampling.max_tokens - request.num_generated
    return min(num_asked, context_length - len(request.token_ids))
