"""`POST /v1/completions`: raw text or token ids in, raw text out; nothing is rendered and nothing parsed."""

import asyncio

from baton.errors import InvalidRequest
from frontend.completions.answer import CompletionAnswer
from frontend.http.fields import decode
from frontend.http.services import Services
from frontend.routing.fleet import ServedModel
from frontend.schema import CompletionBody
from frontend.turn.sampling import Asker, sampling_of, token_requests

DEFAULT_MAX_TOKENS = 16
LONG_BODY_BYTES = 8192


async def prepare_completion(raw: bytes, asker: Asker, services: Services) -> CompletionAnswer:
    """An answer that can be begun. Raises the BatonError that refuses the body."""
    body, unknown = decode(raw, CompletionBody)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream`: true.", param="stream_options")
    served = services.fleet.served(body.model)
    prompts = prompts_of(body)
    num_choices = (body.n or 1) * len(prompts)
    if num_choices > services.max_choices:
        raise InvalidRequest(
            f"`n` for each prompt makes {num_choices} choices; {services.max_choices} can be had at most.",
            param="n",
        )
    if len(raw) > LONG_BODY_BYTES:
        token_ids = await asyncio.to_thread(encode_prompts, prompts, served)
    else:
        token_ids = encode_prompts(prompts, served)
    sampling = sampling_of(
        body,
        served,
        num_prompt_tokens=max(map(len, token_ids)),
        max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
    )
    requests = token_requests(asker, served, token_ids, sampling, body.n or 1, priority=body.priority)
    return CompletionAnswer(body, served, requests, ignored=unknown)


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts, each text or token ids. Raises InvalidRequest for an empty one and for a mixed list."""
    prompt = body.prompt
    prompts: list[str | list[int]] = []
    if isinstance(prompt, str):
        prompts = [prompt]
    elif all(isinstance(item, int) for item in prompt):
        prompts = [[item for item in prompt if isinstance(item, int)]]
    else:
        prompts = [item for item in prompt if not isinstance(item, int)]
        if len(prompts) != len(prompt):
            raise InvalidRequest("`prompt` mixes token ids with texts; put the ids in lists.", param="prompt")
    if not prompts or not all(prompts):
        raise InvalidRequest("`prompt` is empty; give at least one token.", param="prompt")
    return prompts


def encode_prompts(prompts: list[str | list[int]], served: ServedModel) -> list[list[int]]:
    """Token ids of each prompt. Raises InvalidRequest for ids that the model does not have."""
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            encoded.append(served.tokenizer.encode_text(prompt, allow_special=True))
            continue
        if max(prompt) >= served.tokenizer.vocab_size:
            raise InvalidRequest(
                f"`prompt` has token {max(prompt)}; {served.name} has {served.tokenizer.vocab_size} tokens.",
                param="prompt",
            )
        encoded.append(prompt)
    return encoded
