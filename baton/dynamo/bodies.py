"""Baton's requests as bodies for Dynamo's workers, and their chunks and errors as Baton's."""

import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
from msgspec.structs import replace

from baton.dynamo import messages as wire
from baton.dynamo.errors import first_line
from baton.errors import EngineFailure, HandoffFailed, InvalidRequest, NotResumable, WorkerLost
from baton.messages import (
    NO_TOKEN,
    FinishReason,
    GenerateRequest,
    KvHandoff,
    Request,
    Role,
    Sampling,
    StatsRequest,
    TokenChunk,
    TokenLogprob,
    Usage,
    WorkerInfo,
    after_handoff,
)
from baton.structural_tag import structural_tag

CANARY = wire.DynamoRequest(
    token_ids=[1],
    stop_conditions=wire.StopConditions(max_tokens=1, ignore_eos=False),
    sampling_options=wire.SamplingOptions(temperature=0.0, top_p=1.0, top_k=1),
    disaggregated_params={"request_type": "context_and_generation"},
    priority=1.0,
    is_health_check=True,
)
"""A request of one token that an engine answers without a peer."""
_RELEASE_S = 60.0
"""How long a release may take: the decode worker may be full."""
_NO_LOGPROB = -9999.0
"""OpenAI's value for "very unlikely", here for tokens without one."""
_REASONS: dict[str, FinishReason] = {"stop": "stop", "eos": "stop", "length": "length"}
_Chunks = AsyncIterator[wire.DynamoChunk]


def dynamo_body(request: Request, worker: WorkerInfo) -> Any:
    """The request as Dynamo's worker gets it, or a canary. Raises NotResumable, InvalidRequest."""
    if isinstance(request, GenerateRequest):
        return msgspec.to_builtins(dynamo_request(request, worker.role))
    if isinstance(request, StatsRequest):
        return msgspec.to_builtins(replace(CANARY, model=worker.model))
    raise InvalidRequest("Dynamo's workers answer requests for tokens only")


def dynamo_request(request: GenerateRequest, role: Role) -> wire.DynamoRequest:
    """The body for a worker of that role. Decode without a handoff computes the prompt itself. Raises
    NotResumable for the rest of an answer that would not go on as it began, and InvalidRequest."""
    sampling = request.sampling
    if sampling.prompt_logprobs is not None:
        raise InvalidRequest("Dynamo's workers return no log probabilities of the prompt.", param="echo")
    if request.num_generated and not _is_resumable(sampling):
        raise NotResumable("the engine cannot go on in the middle of this answer; send the request again")
    if sampling.logit_bias:
        raise InvalidRequest("`logit_bias`: Dynamo's workers apply none.", param="logit_bias")
    handoff, stops = request.handoff, () if sampling.ignore_eos else sampling.stop_token_ids
    min_tokens = max(0, sampling.min_tokens - request.num_generated)
    max_tokens = sampling.max_tokens - request.num_generated
    priority = request.priority
    return wire.DynamoRequest(
        model=request.model,
        token_ids=request.token_ids,
        stop_conditions=wire.StopConditions(
            max_tokens=1 if role is Role.PREFILL else max_tokens,
            min_tokens=min_tokens or None,
            ignore_eos=not stops,
            stop_token_ids_hidden=list(stops) or None,
        ),
        sampling_options=_options(sampling),
        output_options=None if sampling.logprobs is None else wire.OutputOptions(logprobs=sampling.logprobs),
        routing=wire.Routing(
            priority=-priority or None,
            cache_salt=request.cache_salt or None,
            prefill_worker_id=int(handoff.incarnation) if handoff else None,
        ),
        priority=0.5 - priority / 200 if priority else None,  # TensorRT-LLM's own, from 0 to 1
        prefill_result=_result(handoff) if handoff else None,
        annotations=[wire.BYPASS] if role is Role.DECODE and handoff is None else None,
        eos_token_ids=list(stops) or None,
    )


def _result(handoff: KvHandoff) -> wire.PrefillResult:
    return msgspec.json.decode(handoff.engine_state, type=wire.PrefillResult)


def release_request(request: GenerateRequest, handoff: KvHandoff) -> GenerateRequest:
    """Has decode take KV that nobody waits for: one token, also of the rest of an answer."""
    one = Sampling(max_tokens=request.num_generated + 1, seed=0, temperature=0.0, ignore_eos=True)
    return replace(after_handoff(request, handoff), sampling=one, deadline_s=_RELEASE_S)


def _is_resumable(sampling: Sampling) -> bool:
    """Whether an answer goes on exactly after a prompt: nothing is drawn or depends on the prompt's end."""
    is_greedy = sampling.temperature == 0 or sampling.top_p == 0
    return is_greedy and not (sampling.guided or sampling.frequency_penalty or sampling.presence_penalty)


def _options(sampling: Sampling) -> wire.SamplingOptions:
    """All that have a default are sent: a worker's own may be those of the model's folder."""
    is_greedy = sampling.temperature == 0 or sampling.top_p == 0
    tag = structural_tag(sampling.guided, {}) if sampling.guided else None  # the worker's xgrammar may be old
    return wire.SamplingOptions(
        temperature=0.0 if is_greedy else sampling.temperature,
        top_p=1.0 if is_greedy else sampling.top_p,
        top_k=1 if is_greedy else max(0, sampling.top_k),
        min_p=sampling.min_p or None,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        # A sampled answer is always made from its beginning. For a greedy one vLLM would keep a generator.
        seed=None if is_greedy else sampling.seed_of_attempt(0),
        guided_decoding=None if tag is None else wire.GuidedDecoding(structural_tag=tag),
    )


async def dynamo_replies(
    request: Request, worker: WorkerInfo, items: AsyncIterator[Any]
) -> AsyncGenerator[TokenChunk | KvHandoff, None]:
    """The items of its answer as Baton's replies; none of a canary's. Raises the error that they carry."""
    chunks = (msgspec.convert(item, wire.DynamoChunk) async for item in items)
    if not isinstance(request, GenerateRequest):
        async for _ in items:
            pass
    elif worker.role is Role.PREFILL:
        yield await _prefilled(request, worker, chunks)
    else:
        async for reply in _decoded(request, chunks):
            yield reply


async def _prefilled(request: GenerateRequest, worker: WorkerInfo, chunks: _Chunks) -> TokenChunk | KvHandoff:
    """Prefill's answer, read to its end: a handoff, unless it is complete. Raises HandoffFailed."""
    result, complete, has_engine_ended = wire.PrefillResult(), None, False
    async for chunk in chunks:
        if result.disaggregated_params is None:
            result.disaggregated_params = chunk.disaggregated_params
        if result.prompt_tokens_details is None and chunk.completion_usage is not None:
            result.prompt_tokens_details = chunk.completion_usage.prompt_tokens_details
        token_ids, reason = _ended(chunk, request.sampling, request.num_generated)
        if reason == "stop":  # if the engine says so, what it gives for decode is not needed
            has_engine_ended = chunk.finish_reason is not None
            usage = _usage(request, result.prompt_tokens_details, request.num_generated + len(token_ids))
            complete = TokenChunk(token_ids, reason, usage, _logprobs(token_ids, chunk, request.sampling))
    has_handoff = result.disaggregated_params is not None
    if complete is not None and (has_engine_ended or not has_handoff):
        return complete
    if not has_handoff:
        raise HandoffFailed(f"Prefill worker {worker.label} sent no `disaggregated_params`.")
    return KvHandoff(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        first_token=NO_TOKEN,
        num_prompt_tokens=request.num_prompt_tokens,
        ttl_s=request.deadline_s,
        engine_state=msgspec.json.encode(result),
    )


async def _decoded(request: GenerateRequest, chunks: _Chunks) -> AsyncGenerator[TokenChunk, None]:
    """Decode's answer; the first and the last chunk have usage. The worker's own may come with the last one
    only, and the last one may not say that it is."""
    sampling, num_tokens, has_ended = request.sampling, request.num_generated, False
    details = _result(request.handoff).prompt_tokens_details if request.handoff is not None else None
    async for chunk in chunks:
        usage = chunk.completion_usage
        found = usage.prompt_tokens_details if usage is not None else None
        if found is not None and found.cached_tokens is not None:
            details = found
        token_ids, reason = _ended(chunk, sampling, num_tokens)
        is_first = num_tokens == request.num_generated
        num_tokens += len(token_ids)
        has_ended |= reason is not None
        shown = _usage(request, details, num_tokens) if is_first or reason is not None else None
        yield TokenChunk(token_ids, reason, shown, _logprobs(token_ids, chunk, sampling))
    if not has_ended and num_tokens >= sampling.max_tokens:
        yield TokenChunk((), "length", _usage(request, details, num_tokens))


def _usage(request: GenerateRequest, details: wire.PromptDetails | None, num_tokens: int) -> Usage:
    cached = (details and details.cached_tokens) or 0
    return Usage(request.num_prompt_tokens, min(max(0, cached), request.num_prompt_tokens), num_tokens)


def _ended(
    chunk: wire.DynamoChunk, sampling: Sampling, num_tokens: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The chunk's tokens up to the answer's end, and why it ends. Workers may leave it to the caller to find
    the stop token, and TensorRT-LLM leaves it out. `num_tokens` came before."""
    token_ids, stops = chunk.token_ids, sampling.stop_token_ids
    if chunk.finish_reason is not None:
        reason = _finish_reason(chunk.finish_reason)
        if reason == "stop" and stops and not (token_ids and token_ids[-1] in stops):
            token_ids = (*token_ids, chunk.stop_reason if isinstance(chunk.stop_reason, int) else stops[0])
        return token_ids, reason
    if not sampling.ignore_eos and num_tokens >= sampling.min_tokens:
        for place, token_id in enumerate(token_ids, start=1):
            if token_id in stops:
                return token_ids[:place], "stop"
    return token_ids, None


def _finish_reason(reason: str | wire.ErrorReason) -> FinishReason:
    text = f"error: {reason.error}" if isinstance(reason, wire.ErrorReason) else reason
    if text in _REASONS:
        return _REASONS[text]
    if text == "cancelled":
        raise WorkerLost("the worker cancelled the request")
    said = first_line(text.removeprefix("error").removeprefix(": "))
    raise EngineFailure(f"The engine failed on this request: {said}.")


def _logprobs(
    token_ids: tuple[int, ...], chunk: wire.DynamoChunk, sampling: Sampling
) -> tuple[TokenLogprob, ...] | None:
    """One entry per token, also if the worker sent fewer; None if the client wants none."""
    num_top = sampling.logprobs
    if num_top is None:
        return None
    chosen = itertools.chain(chunk.log_probs or (), itertools.repeat(_NO_LOGPROB))
    tops = itertools.chain(chunk.top_logprobs or (), itertools.repeat(()))
    return tuple(
        TokenLogprob(token_id, logprob, tuple((each.token_id, each.logprob) for each in top[:num_top]))
        for token_id, logprob, top in zip(token_ids, chosen, tops, strict=False)
    )
