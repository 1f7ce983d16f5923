"""One request across its attempts: its tokens so far, the workers to avoid, and when it is given up."""

import asyncio
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from baton.errors import (
    BatonError,
    BrokerLost,
    DeadlineExceeded,
    EngineFailure,
    HandoffFailed,
    HandoffStalled,
    NotReady,
    NotResumable,
    NoWorkers,
    Overloaded,
    WorkerLost,
    WorkerUnreached,
)
from baton.messages import GenerateRequest, TokenChunk, Usage, WorkerInfo
from frontend.record import Leg
from frontend.routing.workers import Call

MAX_ATTEMPTS = 4
"""A request is given up when this many attempts have failed: it may be what kills the workers."""
_ENOUGH_TOKENS = 32
"""A worker that sent this many was not lost because of the request, so failures are counted anew."""
_BACKOFF_S = 0.1
_DIVERGED = "The worker was lost and the regenerated answer diverged; send the request again."


class UnknownToken(WorkerLost):
    """A worker sent a token id that the model does not have."""


class Retry(NamedTuple):
    """What a failed attempt means for the next one."""

    excludes: Literal["none", "last", "prefill", "source"]
    """The worker to avoid: the last one called; the source of the handoff; or the source, else the last."""
    counts: Literal["always", "never", "new"]
    """Whether it counts against MAX_ATTEMPTS. `new`: only while the request has not begun to run, as a full
    worker may refuse a running answer until its deadline."""
    mode: Literal["resume", "replay", "local prefill"] = "resume"
    """The next attempt resumes after the tokens so far, replays the answer from its beginning, or prefills
    on the decode worker, without waiting for KV again."""


RETRIES: dict[type[BatonError], Retry] = {
    BrokerLost: Retry("none", "never"),
    NoWorkers: Retry("prefill", "never"),  # no decode worker can take this handoff
    WorkerUnreached: Retry("last", "never"),
    WorkerLost: Retry("last", "always"),
    Overloaded: Retry("last", "new"),
    NotReady: Retry("last", "new"),
    HandoffStalled: Retry("source", "always", "local prefill"),
    HandoffFailed: Retry("source", "always"),
    NotResumable: Retry("none", "never", "replay"),
}
"""By error, of which the most specific class counts. Other errors end the request."""


def retry_after(error: BatonError) -> Retry | None:
    """How a request goes on after this error; None if it does not."""
    return next((RETRIES[kind] for kind in type(error).__mro__ if kind in RETRIES), None)


class Progress:
    """The state of one request across its attempts. `error` is how the last one ended; `num_ids` is how many
    token ids the model has; `usage` is the latest that a worker reported; `leg` records the attempts.
    """

    def __init__(self, request: GenerateRequest, num_ids: float, leg: Leg | None = None) -> None:
        self.request = request
        self.num_ids = num_ids
        self.token_ids: list[int] = []
        self.usage: Usage | None = None
        self.called: list[WorkerInfo] = []  # in this attempt
        self.calls: list[Call] = []  # those that are open
        self.prefill: WorkerInfo | None = None  # whose handoff this attempt uses
        self.decode: WorkerInfo | None = None  # if it is chosen before prefill
        self.sent = request  # to the first worker of this attempt
        self.avoided: set[str] = set()
        self.leg = leg or Leg.since(time.perf_counter())
        self.error: BatonError | None = None
        self._retry = Retry("none", "never")  # after that error
        self._modes: set[str] = set()  # of all retries so far
        self._expected: list[int] = []
        self._has_begun = False  # a handoff was offered to decode workers; the client may have a status
        self._num_failures = 0
        self._num_tokens_before = 0
        self._deadline = asyncio.get_running_loop().time() + request.deadline_s

    @property
    def prefills_locally(self) -> bool:
        """Whether decode computes the prompt itself."""
        return "local prefill" in self._modes

    @property
    def time_left_s(self) -> float:
        return self._deadline - asyncio.get_running_loop().time()

    def remaining(self) -> GenerateRequest:
        is_replay = "replay" in self._modes
        if is_replay:
            self._expected = self.token_ids.copy()
        generated = [] if is_replay else self.token_ids
        prompt = self.request.token_ids
        self.sent = msgspec.structs.replace(
            self.request,
            token_ids=prompt + generated if generated else prompt,
            num_generated=len(generated),
            deadline_s=self.time_left_s,
        )
        return self.sent

    def take(self, chunk: TokenChunk) -> TokenChunk | None:
        """Keep the chunk's tokens and usage; returns the tokens that are new to the client, or None. Raises
        UnknownToken, or EngineFailure if a regenerated answer diverges.
        """
        if chunk.token_ids and max(chunk.token_ids) >= self.num_ids:
            self.check(chunk.token_ids)
        if chunk.usage is not None:
            self.usage = chunk.usage
        if self._expected:
            num = min(len(chunk.token_ids), len(self._expected))
            is_cut = chunk.finish_reason is not None and num < len(self._expected)
            if is_cut or list(chunk.token_ids[:num]) != self._expected[:num]:
                raise EngineFailure(_DIVERGED)
            del self._expected[:num]
            logprobs = None if chunk.logprobs is None else chunk.logprobs[num:]
            chunk = msgspec.structs.replace(chunk, token_ids=chunk.token_ids[num:], logprobs=logprobs)
            if not chunk.token_ids and chunk.finish_reason is None:
                return None
        self.token_ids += chunk.token_ids
        return chunk

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises UnknownToken if the model does not have these ids."""
        if max(token_ids) >= self.num_ids:
            raise UnknownToken(
                f"Worker {self.called[-1].label} sent token id {max(token_ids)}, which {self.request.model} "
                "does not have; it gets no more requests."
            )

    async def close(self) -> None:
        """Close the attempt's calls, the last first, even if one fails."""
        try:
            while self.calls:
                await self.calls.pop().close()
        finally:
            if self.calls:
                await self.close()

    @property
    def _is_running(self) -> bool:
        return self._has_begun or bool(self.token_ids)

    def lost_with(self, error: BatonError) -> WorkerInfo | None:
        """The worker that this failure proves lost."""
        if isinstance(error.__cause__, WorkerLost):  # prefill, while decode was waiting for its KV
            return self.prefill
        return self.called[-1] if isinstance(error, WorkerLost) and self.called else None

    def note_failure(self, error: BatonError) -> None:
        """Prepare the next attempt. Raises the error if there is none; DeadlineExceeded if it is too late."""
        retry = retry_after(error)
        if retry is None or (retry.mode == "replay" and "replay" in self._modes):
            raise error
        if self.time_left_s <= 0:
            raise DeadlineExceeded
        self._has_begun |= self.prefill not in (None, *self.called[-1:])
        if retry.counts != "never":
            self._count(error, retry)
        source = self.prefill if retry.excludes in {"prefill", "source"} else None
        if source is None and retry.excludes in {"last", "source"}:
            source = self.called[-1]
        if source is not None:
            self.avoided.add(source.incarnation)
        self._modes.add(retry.mode)
        self.called.clear()
        self.prefill = self.decode = None
        self.error, self._retry = error, retry

    async def clear_avoided(self) -> None:
        """Avoid no worker, after a backoff. Raises the last error if it refused a new request."""
        if self.error is not None and self._retry.counts == "new":
            if not self._is_running:
                raise self.error
            await asyncio.sleep(self.error.retry_after_s or 1.0)  # until a queue may have room
        else:
            await asyncio.sleep(_BACKOFF_S * 2**self._num_failures)  # so that failing at once does not spin
        self.avoided.clear()

    def ended_by(self, error: BatonError) -> BatonError:
        """The error for a request whose wait timed out."""
        if self.time_left_s <= 0:
            return DeadlineExceeded()
        return error if self.error is None or isinstance(self.error, BrokerLost) else self.error

    def _count(self, error: BatonError, retry: Retry) -> None:
        """Count a failure. Raises the last one that is allowed."""
        if len(self.token_ids) - self._num_tokens_before >= _ENOUGH_TOKENS:
            self._num_failures = 0
            self.avoided.clear()
        self._num_tokens_before = len(self.token_ids)
        self._num_failures += retry.counts == "always" or not self._is_running
        if self._num_failures == MAX_ATTEMPTS:
            raise error
