"""Baton's requests as bodies for Dynamo's workers, and their chunks and errors as Baton's."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from baton.dynamo import messages as wire
from baton.dynamo.asks import Ask
from baton.dynamo.errors import first_line
from baton.errors import EngineFailure, HandoffFailed, InvalidRequest, NotResumable, WorkerLost
from baton.messages import (
    NO_TOKEN,
    FinishReason,
    GenerateRequest,
    KvHandoff,
    Role,
    Sampling,
    TokenChunk,
    TokenLogprob,
    Usage,
    WorkerInfo,
    after_handoff,
)
from baton.seeds import seed_of_attempt
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
_CANARY_LIMIT_S = 70.0
_NO_LOGPROB = -9999.0
"""OpenAI's value for "very unlikely", here for tokens without one."""
_REASONS: dict[str, FinishReason] = {"stop": "stop", "eos": "stop", "length": "length"}


def dynamo_ask(request: GenerateRequest, worker: WorkerInfo) -> Ask:
    """The question to a worker of Dynamo's. Raises NotResumable, InvalidRequest."""
    has_handoff = request.handoff is not None
    reader = Prefilled(request, worker) if worker.role is Role.PREFILL else Decoded(request)
    return Ask(
        name=request.request_id,
        body=msgspec.to_builtins(dynamo_request(request, worker.role)),
        take=reader.take,
        end=reader.end,
        limit_s=request.deadline_s,
        num_prompt_tokens=0 if has_handoff else len(request.token_ids),
        has_handoff=has_handoff,
        trace_headers=request.trace_headers,
    )


def canary(worker: WorkerInfo) -> Ask:
    """A question that the worker answers without a peer; any answer will do."""
    body = msgspec.to_builtins(replace(CANARY, model=worker.model))
    return Ask(name="canary", body=body, limit_s=_CANARY_LIMIT_S)


def dynamo_request(request: GenerateRequest, role: Role) -> wire.DynamoRequest:
    """The body for a worker of that role. Decode without a handoff computes the prompt itself. Raises
    NotResumable for the rest of an answer that would not go on as it began, and InvalidRequest.
    """
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
    return replace(after_handoff(request, handoff), sampling=one)


def _is_resumable(sampling: Sampling) -> bool:
    """Whether an answer goes on exactly if its tokens so far are a prompt: nothing is drawn, and nothing
    depends on where the prompt ends.
    """
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
        seed=None if is_greedy else seed_of_attempt(sampling, 0),
        guided_decoding=None if tag is None else wire.GuidedDecoding(structural_tag=tag),
    )


class Prefilled:
    """Reads prefill's answer to its end, where it becomes a handoff, unless the answer is complete."""

    def __init__(self, request: GenerateRequest, worker: WorkerInfo) -> None:
        self._request = request
        self._worker = worker
        self._decoded = Decoded(request)
        self._result = wire.PrefillResult()
        self._complete: TokenChunk | None = None
        self._has_engine_ended = False  # then what it gives for decode is not needed

    def take(self, item: Any) -> Iterator[KvHandoff | TokenChunk]:
        """`Ask.take`: nothing before the end."""
        chunk = msgspec.convert(item, wire.DynamoChunk)
        result, usage = self._result, chunk.completion_usage
        if result.disaggregated_params is None:
            result.disaggregated_params = chunk.disaggregated_params
        if result.prompt_tokens_details is None and usage is not None:
            result.prompt_tokens_details = usage.prompt_tokens_details
        reply = self._decoded.read(chunk)
        if reply.finish_reason == "stop":
            self._complete, self._has_engine_ended = reply, chunk.finish_reason is not None
        return iter(())

    def end(self) -> Iterator[KvHandoff | TokenChunk]:
        """`Ask.end`: the reply. Raises HandoffFailed."""
        has_handoff = self._result.disaggregated_params is not None
        if self._complete is not None and (self._has_engine_ended or not has_handoff):
            yield self._complete
            return
        if not has_handoff:
            raise HandoffFailed(f"Prefill worker {self._worker.label} sent no `disaggregated_params`.")
        yield KvHandoff(
            worker_id=self._worker.worker_id,
            incarnation=self._worker.incarnation,
            first_token=NO_TOKEN,
            num_prompt_tokens=self._request.num_prompt_tokens,
            ttl_s=self._request.deadline_s,
            engine_state=msgspec.json.encode(self._result),
        )


class Decoded:
    """Reads decode's answer chunk by chunk. Workers may leave it to the caller to find the end."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._stops = frozenset(() if request.sampling.ignore_eos else request.sampling.stop_token_ids)
        self._num_new = 0
        self._num_cached = 0
        self._has_ended = False
        if request.handoff is not None:  # the worker's own usage may come with the last chunk only
            self._note_cached(_result(request.handoff).prompt_tokens_details)

    def take(self, item: Any) -> Iterator[TokenChunk]:
        """`Ask.take`."""
        yield self.read(msgspec.convert(item, wire.DynamoChunk))

    def read(self, chunk: wire.DynamoChunk) -> TokenChunk:
        """The chunk in Baton's form; the first and the last with usage. Raises the error that it carries."""
        token_ids, reason, request = chunk.token_ids, None, self._request
        if chunk.finish_reason is not None:
            reason = _finish_reason(chunk.finish_reason)
            if reason == "stop":
                token_ids = _with_stop_token(chunk, request.sampling)
        elif not self._stops.isdisjoint(token_ids) and self._num_generated >= request.sampling.min_tokens:
            place = next(place for place, token_id in enumerate(token_ids) if token_id in self._stops)
            token_ids, reason = token_ids[: place + 1], "stop"
        is_first = not self._num_new
        self._num_new += len(token_ids)
        if chunk.completion_usage is not None:
            self._note_cached(chunk.completion_usage.prompt_tokens_details)
        self._has_ended |= reason is not None
        usage = self._usage() if is_first or reason is not None else None
        if request.sampling.logprobs is None:
            return TokenChunk(token_ids, reason, usage)
        return TokenChunk(token_ids, reason, usage, _logprobs(token_ids, chunk, request.sampling.logprobs))

    def end(self) -> Iterator[TokenChunk]:
        """`Ask.end`: the last chunk, if the worker sent all tokens without a finish reason."""
        if not self._has_ended and self._num_generated >= self._request.sampling.max_tokens:
            yield TokenChunk((), "length", self._usage())

    @property
    def _num_generated(self) -> int:
        return self._request.num_generated + self._num_new

    def _usage(self) -> Usage:
        return Usage(self._request.num_prompt_tokens, self._num_cached, self._num_generated)

    def _note_cached(self, details: wire.PromptDetails | None) -> None:
        if details is not None and details.cached_tokens is not None:
            self._num_cached = min(max(0, details.cached_tokens), self._request.num_prompt_tokens)


def _finish_reason(reason: str | wire.ErrorReason) -> FinishReason:
    text = f"error: {reason.error}" if isinstance(reason, wire.ErrorReason) else reason
    if text in _REASONS:
        return _REASONS[text]
    if text == "cancelled":
        raise WorkerLost("the worker cancelled the request")
    said = first_line(text.removeprefix("error").removeprefix(": "))
    raise EngineFailure(f"The engine failed on this request: {said}.")


def _with_stop_token(chunk: wire.DynamoChunk, sampling: Sampling) -> tuple[int, ...]:
    """With the stop token that ended the answer, which TensorRT-LLM leaves out."""
    token_ids, stops = chunk.token_ids, sampling.stop_token_ids
    if not stops or (token_ids and token_ids[-1] in stops):
        return token_ids
    return (*token_ids, chunk.stop_reason if isinstance(chunk.stop_reason, int) else stops[0])


def _logprobs(token_ids: tuple[int, ...], chunk: wire.DynamoChunk, num_top: int) -> tuple[TokenLogprob, ...]:
    """One entry per token, also if the worker sent fewer."""
    rest = len(token_ids)
    chosen = [*(chunk.log_probs or ()), *[_NO_LOGPROB] * rest]
    tops = [*(chunk.top_logprobs or ()), *[[] for _ in range(rest)]]
    return tuple(
        TokenLogprob(token_id, logprob, tuple((each.token_id, each.logprob) for each in top[:num_top]))
        for token_id, logprob, top in zip(token_ids, chosen, tops, strict=False)
    )
