"""Translates between TensorRT-LLM's types and the embedded engine's."""

import base64
import dataclasses
from typing import Any

import msgspec

from baton.messages import GenerateRequest, KvHandoff, Sampling, TokenChunk, TokenLogprob
from tensorrt_llm.executor.result import Logprob, Response
from tensorrt_llm.params import DisaggregatedParams
from workers.engines.embedded.transfer import HandoffState

FOREVER_S = 1e6
_ENDPOINT = "tcp://double/"  # the real one serves what `opaque_state` holds here


@dataclasses.dataclass
class Request:
    """A request's arguments. `kind` is the request type."""

    request_id: int
    token_ids: list[int]
    sampling: Any
    streaming: bool
    kind: str
    params: Any


def stops_of(job: Request) -> list[int | None]:
    """The tokens that end it. In a context phase, max_tokens of 1 is checked before tokens other than
    `end_id`."""
    asked = job.sampling
    words = [] if job.kind == "context_only" else [*(asked.stop_token_ids or ())]
    if asked.ignore_eos:
        return []
    return [*words, asked.end_id]


def request_of(job: Request, *, max_tokens: int, stops: list[int | None]) -> GenerateRequest:
    """The embedded engine's request."""
    asked = job.sampling
    bias = asked.embedding_bias
    sampling = Sampling(
        max_tokens=max_tokens,
        seed=asked.seed or 0,
        min_tokens=asked.min_tokens or 0,
        temperature=0.0 if asked.greedy else 1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=asked.top_k or 0,
        min_p=asked.min_p or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        logit_bias={} if bias is None else {int(i): float(bias[i]) for i in bias.nonzero().flatten()},
        stop_token_ids=tuple(token_id for token_id in stops if token_id is not None and token_id >= 0),
        logprobs=asked.logprobs,
    )
    ignored = getattr(asked, "prompt_ignore_length", None)  # the part that penalties treat as the prompt
    num_generated = 0 if ignored is None else max(0, len(job.token_ids) - ignored)
    sampling = msgspec.structs.replace(
        sampling,
        max_tokens=max_tokens + num_generated,
        min_tokens=sampling.min_tokens and sampling.min_tokens + num_generated,
    )
    return GenerateRequest(
        request_id=str(job.request_id),
        model="double",
        token_ids=job.token_ids,
        sampling=sampling,
        deadline_s=FOREVER_S,
        num_generated=num_generated,
    )


def response_of(job: Request, chunk: TokenChunk, params: Any) -> Response:
    """The response of one step."""
    sampling = job.sampling
    token_ids, stop_reason = list(chunk.token_ids), None
    if chunk.finish_reason == "stop" and token_ids[-1] in (sampling.stop_token_ids or ()):
        stop_reason = token_ids[-1]
        if not sampling.include_stop_str_in_output:
            token_ids.pop()
    logprobs = None
    if chunk.logprobs is not None:
        logprobs = [_logprobs(entry) for entry in chunk.logprobs[: len(token_ids)]]
    return Response(token_ids, logprobs, chunk.finish_reason, stop_reason, params)


def _logprobs(entry: TokenLogprob) -> dict[int, Logprob]:
    found = {token_id: Logprob(value, rank) for rank, (token_id, value) in enumerate(entry.top, 1)}
    return {entry.token_id: Logprob(entry.logprob), **found}


def joined(chunks: list[TokenChunk]) -> TokenChunk:
    """Several steps merged into one."""
    return TokenChunk(
        tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        chunks[-1].finish_reason,
        chunks[0].usage,
        tuple(entry for chunk in chunks for entry in chunk.logprobs or ()) or None,
    )


def params_of(job: Request, handoff: KvHandoff, *, by_python: bool) -> Any:
    """The transferred state: `opaque_state` and the first token, which the Python transceiver also serves at
    `ctx_info_endpoint`. The token's log-probability has its own field, as Python objects."""
    state = msgspec.msgpack.decode(handoff.engine_state, type=HandoffState)
    bare = msgspec.msgpack.encode(msgspec.structs.replace(state, logprob=None))
    opaque = msgspec.msgpack.encode(msgspec.structs.replace(handoff, engine_state=bare))
    return DisaggregatedParams(
        request_type="context_only",
        first_gen_tokens=[] if by_python else [handoff.first_token],
        first_gen_log_probs=[_logprobs(state.logprob)] if state.logprob is not None else None,
        ctx_request_id=job.request_id,
        opaque_state=None if by_python else opaque,
        ctx_info_endpoint=_ENDPOINT + base64.b64encode(opaque).decode() if by_python else None,
        ctx_dp_rank=0 if by_python else None,
        disagg_request_id=job.params.disagg_request_id,
    )


def handoff_of(params: Any) -> KvHandoff:
    """The embedded engine's handoff for the context."""
    opaque = params.opaque_state or base64.b64decode(params.ctx_info_endpoint.removeprefix(_ENDPOINT))
    handoff = msgspec.msgpack.decode(opaque, type=KvHandoff)
    state = msgspec.msgpack.decode(handoff.engine_state, type=HandoffState)
    first_token = params.first_gen_tokens[0] if params.first_gen_tokens else handoff.first_token
    logprob = None
    if params.first_gen_log_probs:
        (entries,) = params.first_gen_log_probs
        top = sorted(((i, e.logprob) for i, e in entries.items() if e.rank), key=lambda pair: -pair[1])
        logprob = TokenLogprob(first_token, entries[first_token].logprob, tuple(top))
    full = msgspec.msgpack.encode(msgspec.structs.replace(state, logprob=logprob))
    return msgspec.structs.replace(handoff, first_token=first_token, engine_state=full)
