"""Dynamo's bodies and model cards, as far as Baton reads or writes them; other fields are ignored.

They cross Dynamo's request plane as JSON-like objects: `msgspec.convert` and `msgspec.to_builtins`."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.messages import TokenId

_One = Annotated[int, Meta(ge=1, le=1)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StopConditions(msgspec.Struct, kw_only=True, omit_defaults=True):
    """When an answer ends; `max_tokens` must be sent. TensorRT-LLM's ids lack a hidden stop token."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stop_token_ids_hidden: list[int] | None = None
    stop_token_ids_visible: list[int] | None = None


class GuidedDecoding(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of an answer: one of these. `structural_tag` is xgrammar's, as an object or its text."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None


class SamplingOptions(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to choose tokens; what is None is the worker's default. TensorRT-LLM refuses unknown names."""

    n: _One | None = None
    best_of: _One | None = None
    use_beam_search: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: _Share | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: dict[TokenId, float] | None = None
    seed: int | None = None
    guided_decoding: GuidedDecoding | None = None


class OutputOptions(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`logprobs` 0 is the chosen token's, n also the n likeliest."""

    logprobs: int | None = None
    prompt_logprobs: None = None


class Routing(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A higher `priority` runs first. Requests with different `cache_salt` share no cached KV."""

    priority: int | None = None
    cache_salt: str | None = None
    prefill_worker_id: int | None = None


class PromptDetails(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The part of a prompt that was found in a cache."""

    cached_tokens: int | None = None


class CompletionUsage(msgspec.Struct, kw_only=True):
    """Token counts; `prompt_tokens` are those of the request, also of one that resumes an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class PrefillResult(msgspec.Struct, kw_only=True):
    """What decode gets of prefill's answer. `disaggregated_params` are the engine's, or a string."""

    disaggregated_params: Any = None
    prompt_tokens_details: PromptDetails | None = None


BYPASS = "x-bypass-remote-prefill"
"""The annotation with which a decode worker prefills by itself."""


class DynamoRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One choice of one request. `is_health_check`: a canary, which the engine answers without a peer;
    TensorRT-LLM's needs `disaggregated_params` and the highest `priority` (0 to 1), which no other has."""

    token_ids: list[TokenId]
    model: str = ""
    stop_conditions: StopConditions = msgspec.field(default_factory=StopConditions)
    sampling_options: SamplingOptions = msgspec.field(default_factory=SamplingOptions)
    output_options: OutputOptions | None = None
    routing: Routing | None = None
    prefill_result: PrefillResult | None = None
    annotations: list[str] | None = None
    eos_token_ids: list[int] | None = None
    priority: float | None = None
    disaggregated_params: Any = None
    is_health_check: bool = msgspec.field(default=False, name="_HEALTH_CHECK")


class ErrorReason(msgspec.Struct):
    """A `finish_reason` of an answer that failed; others are `error` and `error: ...`."""

    error: str


class TopLogprob(msgspec.Struct, omit_defaults=True):
    """One of the likeliest tokens; some workers give its rank."""

    token_id: TokenId
    logprob: float
    rank: int | None = None


class DynamoChunk(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of an answer. The last one has `finish_reason`: eos, stop, length, cancelled or an error.
    `log_probs` has one number per token, `top_logprobs` one list; both are missing if an engine has them for
    some tokens only. Prefill's has `disaggregated_params`."""

    token_ids: tuple[TokenId, ...] = ()
    finish_reason: str | ErrorReason | None = None
    stop_reason: int | str | None = None
    log_probs: list[float] | None = None
    top_logprobs: list[list[TopLogprob]] | None = None
    completion_usage: CompletionUsage | None = None
    disaggregated_params: Any = None


class RuntimeConfig(msgspec.Struct, kw_only=True):
    """An engine's limits. With a `disaggregated_endpoint` (SGLang, NIXL push), decode is asked first."""

    context_length: int | None = None
    max_num_seqs: int | None = None
    disaggregated_endpoint: Any = None
    runtime_data: dict[str, Any] | None = None


class Artifact(msgspec.Struct):
    """A file of the model, by path or URL."""

    path: str = ""


class ModelCard(msgspec.Struct, kw_only=True):
    """A worker's registration: its model, its role (prefill, decode, aggregated, encode) and its engine."""

    display_name: Annotated[str, Meta(min_length=1, max_length=512)]
    source_path: str = ""
    tokenizer: dict[str, Artifact] | None = None
    model_input: str = "Tokens"
    worker_type: str | None = None
    context_length: int | None = None
    architectural_max_context_length: int | None = None
    runtime_config: RuntimeConfig = msgspec.field(default_factory=RuntimeConfig)
