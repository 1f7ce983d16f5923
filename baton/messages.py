"""Every type that crosses a process boundary: frozen structs, with durations instead of instants."""

import enum
from typing import Annotated, Literal

import msgspec


class Role(enum.Enum):
    """A worker's role. An aggregated worker is a DECODE worker that gets no handoff."""

    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = object.__hash__  # Enum's own is written in Python


Syntax = Literal["json_schema", "regex", "lark", "ebnf"]


class MessageForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One kind of message: one of `headers`, then a body, then `end`.

    In `headers` and `end`, `<|name|>` is the control token of that name; a body has none. The body follows
    `grammar`; None allows any text. If `lenient`, parts of a JSON schema that the engine cannot enforce are
    dropped; else they raise InvalidRequest, as does a syntax that the engine does not support. `param` is the
    client's field with the grammar, for error messages."""

    headers: tuple[str, ...]
    end: str
    grammar: str | None = None
    syntax: Syntax = "json_schema"
    lenient: bool = False
    param: str | None = None


class Guided(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an answer: any number of `leading` messages (one at most if `leads_once`), then one `last`
    message.

    An engine that cannot enforce it raises InvalidRequest. Tokens after the last message are not constrained.
    """

    leading: tuple[MessageForm, ...] = ()
    last: tuple[MessageForm, ...]
    leads_once: bool = False


Count = Annotated[int, msgspec.Meta(ge=0)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. Sampling is positional: the random number of token i of choice c depends on
    (seed, c, i) only, so that a resumed request continues exactly.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 are off. `logprobs` None returns none, 0 the chosen
    token's, n also the n likeliest; `prompt_logprobs` returns the same for the prompt's tokens, if the answer
    has one token, since no handoff carries them. `stop_token_ids` end the answer unless `ignore_eos`, but not
    before `min_tokens` tokens, unless `guided` allows nothing else. `seed` is always set: the frontend draws
    one if the client gave none (`is_seeded`: it gave this one). `guided` is applied before all other fields,
    which choose among what it allows."""

    max_tokens: int
    seed: int
    is_seeded: bool = False
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    choice: Count = 0
    guided: Guided | None = None

    def seed_of_attempt(self, num_generated: int) -> int:
        """A 63-bit seed for an engine without positional sampling: the request's own seed for the first
        attempt at the first choice."""
        # Odd numbers of high entropy (golden ratio, square root of 3) keep choices and attempts apart.
        choice, resumed = self.choice * 0x1E3779B97F4A7C15, num_generated * 0x3504F333F9DE6485
        return (self.seed + choice + resumed) & ((1 << 63) - 1)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of a token; `top` has the likeliest (id, logprob) pairs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""A duration."""


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of one choice so far: prompt, cached part of it, and generated (stop token included); the
    KV that decode pulled for it, None if the engine does not tell. Seconds until the first token: in the
    worker's queue, for the KV to move, to compute the prompt; `delay_s` is the longest time that the worker's
    event loop stood still, in which it waited for a CPU for `starved_s`."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_moved_bytes: int | None = None
    waited_s: Seconds = 0.0
    moved_s: Seconds = 0.0
    computed_s: Seconds = 0.0
    delay_s: Seconds = 0.0
    starved_s: Seconds = 0.0


UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the message that was expected."""

FinishReason = Literal["stop", "length"]
TokenId = Count
NO_TOKEN = -1  # in TensorRT-LLM's spelling


class TokenChunk(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """Tokens of one engine step. The last chunk of an answer has `finish_reason` and `usage`; the first has
    `usage` too, since not every answer is read to its end.

    A stop token that ended the answer is the last of `token_ids`. `logprobs` has one entry per token if the
    request asked for them; `prompt_logprobs` one per token of the prompt except the first."""

    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class KvHandoff(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="handoff"):
    """What decode needs to continue from prefill's KV cache.

    Only the engine that wrote `engine_state` reads it; its worker adds its id and incarnation. Prefill
    sampled `first_token`; decode emits it as its own first token. It is NO_TOKEN if TensorRT-LLM sends it to
    decode only. But if there is a `first_chunk`, the client gets that at once, and decode gets its token as a
    generated one that follows the `num_prompt_tokens`. The KV stays pinned at the source for `ttl_s`, or
    until it has moved, or until the prefill call is closed. Durations as in `Usage`."""

    worker_id: str = ""
    incarnation: str = ""
    first_token: Annotated[int, msgspec.Meta(ge=NO_TOKEN)]
    num_prompt_tokens: int
    ttl_s: float
    engine_state: bytes
    first_chunk: TokenChunk | None = None
    waited_s: Seconds = 0.0
    computed_s: Seconds = 0.0
    delay_s: Seconds = 0.0
    starved_s: Seconds = 0.0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """One choice of one request, as token ids.

    The last `num_generated` of `token_ids` were generated by an earlier, lost attempt: they count as
    completion, not as prompt, and are not sent again. `deadline_s` is the time left when it was sent. Waiting
    requests with a lower `priority` (-100 to 100) run first. Requests with different `cache_salt` share no
    cached KV. The first `num_opening_tokens`, before the conversation's first answer, are equal in all its
    turns; 0: unknown. `local_prefill_tokens`: a decode worker without a handoff computes at most so many
    prompt tokens at a time, else it answers `PrefillFirst`; None: any number. `trace_headers` are W3C's, for
    the engine's own spans."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling: Sampling
    deadline_s: float
    num_generated: Count = 0
    priority: int = 0
    handoff: KvHandoff | None = None
    cache_salt: str = ""
    num_opening_tokens: int = 0
    local_prefill_tokens: int | None = None
    trace_headers: dict[str, str] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """How many of `token_ids` no attempt has generated."""
        return len(self.token_ids) - self.num_generated


def after_handoff(request: GenerateRequest, handoff: KvHandoff) -> GenerateRequest:
    """What decode is asked once prefill has answered `request` with this handoff."""
    sent = handoff.first_chunk.token_ids if handoff.first_chunk else ()
    return msgspec.structs.replace(
        request,
        handoff=handoff,
        token_ids=[*request.token_ids, *sent],
        num_generated=request.num_generated + len(sent),
    )


class StatsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Asks a worker for one `WorkerStats`."""


class FrontendRequest(msgspec.Struct, frozen=True, kw_only=True, tag="frontend"):
    """A message from one frontend process to another, in their own encoding; no worker takes it."""

    data: bytes


class FrontendReply(msgspec.Struct, frozen=True, array_like=True, tag="frontend"):
    """One reply to a `FrontendRequest`, in the frontend's own encoding."""

    data: bytes


class KvAsk(msgspec.Struct, frozen=True, tag="kv_ask"):
    """A decode worker's question to the source of a KV offer: may it read the last `num_bytes`? `secret` is
    the ticket's. `is_direct`: it reads the source's memory itself. The call is open while it reads."""

    offer_id: int
    secret: bytes
    num_bytes: int
    is_direct: bool = False


class KvConfirm(KvAsk, frozen=True, tag="kv_confirm"):
    """The reader has what it asked for, which ends the offer; HandoffFailed if it had ended before: the bytes
    are not valid then."""


class KvGrant(msgspec.Struct, frozen=True, array_like=True, tag="kv_grant"):
    """The offer stands: its bytes (over UCX, how to read them), or the port of a socket that gives them to
    the sender of `token`."""

    payload: bytes = b""
    port: int = 0
    token: bytes = b""


class KvWithdrawn(msgspec.Struct, frozen=True, array_like=True, tag="kv_withdrawn"):
    """The offer has ended before it was read."""


class PrefillFirst(msgspec.Struct, frozen=True, array_like=True, tag="prefill"):
    """A decode worker's only reply if it would have to compute more than `local_prefill_tokens`: the prompt
    needs a prefill worker. `is_busy`: it would take them if it were not computing other prompts."""

    num_lacking_tokens: int
    is_busy: bool


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="stats"):
    """A worker's live figures; `frontend.metrics` names the metric that each becomes, by worker and role.

    `num_strange_messages` came from no process of Baton's and were ignored. `kv_cached_blocks` are free, but
    their KV can be found again. `num_prompt_tokens` were computed here, `num_cached_tokens` found instead.
    Guesses are tokens of answers that were tried at once, see `--speculate`."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks: int = 0
    kv_used_blocks: int = 0
    kv_pinned_blocks: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_handoffs: int = 0
    num_handoffs_expired: int = 0
    kv_moved_bytes: int = 0
    kv_move_s: float = 0.0
    kv_cached_blocks: int = 0
    num_cached_tokens: int = 0
    num_strange_messages: int = 0
    num_accepted_guesses: int = 0
    num_rejected_guesses: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of an answer in one step; None without guesses, or if only a warm-up had some."""
        num_steps = self.num_generated_tokens - self.num_accepted_guesses
        has_guessed = self.num_accepted_guesses + self.num_rejected_guesses > 0
        return self.num_generated_tokens / num_steps if has_guessed and num_steps > 0 else None


NO_DRAFT = "none"


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a KV cache; two workers can exchange KV only if all of it is equal.

    `tensor_parallel_size` None: the engine reshards the heads in transit, so the sizes may differ.
    `max_handoff_tokens` is the longest prompt that the transfer buffer holds; None is unlimited. `draft`: the
    draft model whose KV is in the cache, too, and how it guesses tokens."""

    dtype: str
    tokens_per_block: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tensor_parallel_size: int | None = 1
    max_handoff_tokens: int | None = None
    draft: str = NO_DRAFT


class Scores(msgspec.Struct, frozen=True, array_like=True):
    """The likeliest next tokens, as (id, logprob), after each prompt of the number check; `prompts` is their
    digest."""

    prompts: str
    likeliest: Annotated[
        tuple[Annotated[tuple[tuple[TokenId, float], ...], msgspec.Meta(max_length=16)], ...],
        msgspec.Meta(min_length=1, max_length=64),
    ]


WORKER_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
"""The pattern of a worker's name."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A started engine. `kv_transfer` names the transceiver (`ucx` or `tcp`, with its transport);
    `baton.pairing` decides who is paired. `max_batch_size` requests run at a time (None: unknown),
    `max_queue_size` more may wait. `is_simulated`: no model computes the answers. `scores` None: unknown."""

    engine: str
    engine_version: str
    context_length: int
    kv_layout: KvLayout | None = None
    kv_transfer: str = ""
    max_batch_size: int | None = None
    max_queue_size: int = 0
    is_simulated: bool = False
    scores: Scores | None = None


class WorkerInfo(EngineInfo, frozen=True, kw_only=True):
    """A worker in discovery, with its engine. `incarnation` is new with every process start.

    A worker gets no requests until `is_ready`, after its warm-up; `cold_peers` are the ids of the peers with
    which that failed. `checkpoint` is the fingerprint of its weights; empty: unknown. `name` is the
    operator's, the same after a restart; `host` and `pid` are of the process. `refusal`: why no frontend may
    use it."""

    worker_id: str
    incarnation: str
    role: Role
    endpoint: str
    model: str
    model_path: str
    address: str
    is_ready: bool = True
    cold_peers: tuple[str, ...] = ()
    checkpoint: str = ""
    name: Annotated[str, msgspec.Meta(pattern=rf"\A({WORKER_NAME})?\Z")] = ""
    host: Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{0,253}\Z")] = ""
    pid: Count = 0
    refusal: str = ""

    @property
    def label(self) -> str:
        """What people read: the name, or the id if it has none."""
        return self.name or self.worker_id


Request = GenerateRequest | StatsRequest | FrontendRequest | KvAsk | KvConfirm


Reply = TokenChunk | KvHandoff | PrefillFirst | WorkerStats | FrontendReply | KvGrant | KvWithdrawn
