"""vLLM's outputs for each step of a request and of its scheduler."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Logprob:
    """Log-probability of a token, and its rank among all (1 is the likeliest)."""

    logprob: float
    rank: int | None = None


@dataclasses.dataclass
class CompletionOutput:
    """One answer: its new part or all of it so far, depending on RequestOutputKind."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass
class RequestStateStats:
    """The core's times of a request (monotonic). It is scheduled once its KV has arrived."""

    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0


@dataclasses.dataclass
class RequestOutput:
    """One step of a request. Untaken steps are merged."""

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestStateStats | None = None

    def add(self, later: "RequestOutput") -> None:
        """Merge the next step into this one."""
        self.finished |= later.finished
        self.kv_transfer_params = later.kv_transfer_params
        self.metrics = later.metrics
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        (mine,), (new,) = self.outputs, later.outputs
        mine.token_ids += new.token_ids
        mine.finish_reason = new.finish_reason
        if mine.logprobs is not None:
            mine.logprobs += new.logprobs or []


@dataclasses.dataclass
class SchedulerStats:
    """The scheduler's stats after a step. KV that waits to be pulled counts as used."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    kv_connector_stats: dict[str, Any] | None = None
