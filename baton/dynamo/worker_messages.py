"""Behind Dynamo's frontend: its requests as Baton's, and Baton's replies as its chunks."""

import json
import random
import re
from collections.abc import Callable
from itertools import chain
from typing import Any

import msgspec

from baton.dynamo import messages as wire
from baton.errors import HandoffFailed, InvalidRequest
from baton.messages import (
    GenerateRequest,
    Guided,
    KvHandoff,
    MessageForm,
    Role,
    Sampling,
    Syntax,
    TokenChunk,
    WorkerInfo,
)
from baton.pairing import why_not_paired

DEADLINE_S = 4 * 3600.0
"""Dynamo's requests have no deadline; an answer of a whole context takes hours on a slow engine."""
_MOST_PRIORITY = 100
_META = re.compile(r"[\\.+*?()|\[\]{}^$/-]")
_ANALYSIS = MessageForm(headers=("<|channel|>analysis<|message|>",), end="<|end|><|start|>assistant")
_FINAL = MessageForm(headers=("<|channel|>final<|message|>",), end="<|return|>")
_SAME = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_FORMS: dict[str, Callable[[Any], tuple[Syntax, str]]] = {
    "json": lambda schema: ("json_schema", schema if isinstance(schema, str) else json.dumps(schema)),
    "regex": lambda text: ("regex", text),
    "choice": lambda choices: ("regex", "|".join(_META.sub(r"\\\g<0>", choice) for choice in choices)),
    "grammar": lambda text: ("ebnf" if "::=" in text else "lark", text),
}


class PrefillAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="baton-prefill-1"):
    """`disaggregated_params` of Baton's workers: prefill's handoff, or its finished answer, which Dynamo's
    frontend takes from decode only if it ended with its length. `source`: the prefill worker."""

    source: WorkerInfo
    reply: KvHandoff | TokenChunk


def generate_request(
    body: wire.DynamoRequest, card: WorkerInfo, request_id: str, start_id: int
) -> GenerateRequest:
    """The request of a worker with this `card`, without its handoff. `start_id` is `<|start|>`: a prompt that
    ends in the header of a message is a conversation's. Raises InvalidRequest, naming Dynamo's field."""
    stops, options = body.stop_conditions, body.sampling_options
    output, routing = body.output_options or wire.OutputOptions(), body.routing or wire.Routing()
    if options.use_beam_search:
        raise InvalidRequest("beam search is not served", param="use_beam_search")
    ends = (stops.stop_token_ids, stops.stop_token_ids_hidden, stops.stop_token_ids_visible)
    sampling = Sampling(
        # Dynamo's frontend asks prefill for one token; only decode knows the limit.
        max_tokens=(card.role is Role.DECODE and stops.max_tokens) or card.context_length,
        min_tokens=stops.min_tokens or 0,
        stop_token_ids=tuple(dict.fromkeys(chain(*filter(None, (*ends, body.eos_token_ids))))),
        ignore_eos=bool(stops.ignore_eos),
        logprobs=output.logprobs,
        guided=_guided(options.guided_decoding, is_conversation=start_id in body.token_ids[-2:]),
        seed=random.getrandbits(63) if options.seed is None else options.seed % (1 << 63),
        is_seeded=options.seed is not None,
        top_k=max(options.top_k or 0, 0),
        logit_bias=options.logit_bias or {},
        **{name: value for name in _SAME if (value := getattr(options, name)) is not None},
    )
    return GenerateRequest(
        request_id=request_id,
        model=body.model,
        token_ids=body.token_ids,
        deadline_s=DEADLINE_S,
        # Dynamo's higher ones run first, Baton's lower ones.
        priority=min(max(-(routing.priority or 0), -_MOST_PRIORITY), _MOST_PRIORITY),
        cache_salt=routing.cache_salt or "",
        sampling=sampling,
    )


def _guided(asked: wire.GuidedDecoding | None, *, is_conversation: bool) -> Guided | None:
    """The form of the final message after at most one of reasoning, or of a raw completion."""
    given = {} if asked is None else msgspec.structs.asdict(asked)
    demanded = {name: value for name, value in given.items() if value is not None}
    if not demanded:
        return None
    (name, value), *others = demanded.items()
    if others or name not in _FORMS:
        raise InvalidRequest(
            f"`guided_decoding` has {', '.join(demanded)}; it must have one of {', '.join(_FORMS)}",
            param="guided_decoding",
        )
    syntax, grammar = _FORMS[name](value)
    final = msgspec.structs.replace(_FINAL, syntax=syntax, grammar=grammar, param=name)
    if is_conversation:
        return Guided(leading=(_ANALYSIS,), last=(final,), leads_once=True)
    return Guided(last=(msgspec.structs.replace(final, headers=("",)),))


def dynamo_chunk(reply: KvHandoff | TokenChunk, source: WorkerInfo) -> wire.DynamoChunk:
    """The reply of the worker `source` for Dynamo's frontend. Prefill's goes to decode if it ended with
    `length`, which Dynamo's frontend does not take for the answer's."""
    if isinstance(reply, KvHandoff) or (source.role is Role.PREFILL and reply.finish_reason == "length"):
        token_ids = (max(reply.first_token, 0),) if isinstance(reply, KvHandoff) else reply.token_ids
        params = msgspec.to_builtins(PrefillAnswer(source=source, reply=reply))
        return wire.DynamoChunk(token_ids=token_ids, finish_reason="length", disaggregated_params=params)
    chunk = wire.DynamoChunk(token_ids=reply.token_ids, finish_reason=reply.finish_reason)
    if reply.logprobs is not None:
        chunk.log_probs = [each.logprob for each in reply.logprobs]
        tops = [each.top or ((each.token_id, each.logprob),) for each in reply.logprobs]
        chunk.top_logprobs = [
            [wire.TopLogprob(token_id, value, rank) for rank, (token_id, value) in enumerate(top, start=1)]
            for top in tops
        ]
    if (usage := reply.usage) is not None:
        chunk.completion_usage = wire.CompletionUsage(
            prompt_tokens=usage.num_prompt_tokens,
            completion_tokens=usage.num_completion_tokens,
            total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
            prompt_tokens_details=wire.PromptDetails(cached_tokens=usage.num_cached_tokens),
        )
    return chunk


def prefill_answer(params: object, card: WorkerInfo) -> KvHandoff | TokenChunk:
    """What the prefill worker of a decode worker with this `card` answered. Raises HandoffFailed, with the
    reason, if it was another engine's, or a worker's that is not paired with this one."""
    try:
        answer = msgspec.convert(params, PrefillAnswer)
    except msgspec.ValidationError as error:
        what = "prefill and decode workers must be of one kind"
        raise HandoffFailed(f"the handoff is not Baton's, {what}: {error}") from error
    if reason := why_not_paired(answer.source, card):
        raise HandoffFailed(f"the handoff is another fleet's: {reason}")
    return answer.reply
