"""One request across its attempts: its tokens so far, whom it avoids, and when it gives up."""

import asyncio

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

MAX_ATTEMPTS = 4
"""A request that makes engines fail takes at most so many with it."""
_ENOUGH_TOKENS = 32
"""A worker that has sent so many was not lost because of this request, so failures are counted anew."""
_PAUSE_S = 0.1
_ANOTHER = (
    "The worker was lost, and this answer, made again from its beginning, differs; send the request again."
)

_BLAMELESS = BrokerLost | NoWorkers | NotResumable | WorkerUnreached


class Progress:
    """The state of one request across its attempts. `error` is how the last one ended; `num_ids` is how many
    token ids the model has; `usage` is the latest that a worker told.
    """

    def __init__(self, request: GenerateRequest, num_ids: float) -> None:
        self.request = request
        self.num_ids = num_ids
        self.token_ids: list[int] = []
        self.usage: Usage | None = None
        self.asked: list[WorkerInfo] = []
        self.prefill: WorkerInfo | None = None
        self.avoided: set[str] = set()
        self.is_stalled = False  # decode prefills by itself, rather than wait for another worker's KV in vain
        self.error: BatonError | None = None
        self.is_replayed = False  # from its first token, as the engine cannot go on in the middle
        self._expected: list[int] = []
        self.is_handed_off = False  # to decode workers that refused it; the client may have a status already
        self._num_failures = 0
        self._num_tokens_before = 0
        self._deadline = asyncio.get_running_loop().time() + request.deadline_s

    @property
    def time_left_s(self) -> float:
        """The time until the deadline."""
        return self._deadline - asyncio.get_running_loop().time()

    def remaining(self) -> GenerateRequest:
        """The request for the next attempt."""
        if self.error is None:
            return msgspec.structs.replace(self.request, deadline_s=self.time_left_s)
        if self.is_replayed:
            self._expected = self.token_ids.copy()
            return msgspec.structs.replace(self.request, deadline_s=self.time_left_s, is_retry=True)
        return msgspec.structs.replace(
            self.request,
            token_ids=self.request.token_ids + self.token_ids,
            num_generated=len(self.token_ids),
            deadline_s=self.time_left_s,
            is_retry=True,
        )

    def take(self, chunk: TokenChunk) -> TokenChunk | None:
        """Keep the chunk's tokens; returns what the client has not got of it, None if that is nothing. Raises
        EngineFailure if an answer that is made again is another one.
        """
        if self._expected:
            num = min(len(chunk.token_ids), len(self._expected))
            is_cut = chunk.finish_reason is not None and num < len(self._expected)
            if is_cut or list(chunk.token_ids[:num]) != self._expected[:num]:
                raise EngineFailure(_ANOTHER)
            del self._expected[:num]
            logprobs = None if chunk.logprobs is None else chunk.logprobs[num:]
            chunk = msgspec.structs.replace(chunk, token_ids=chunk.token_ids[num:], logprobs=logprobs)
            if not chunk.token_ids and chunk.finish_reason is None:
                return None
        self.token_ids += chunk.token_ids
        return chunk

    @property
    def _is_running(self) -> bool:
        return self.is_handed_off or bool(self.token_ids)

    def lost_with(self, error: BatonError) -> WorkerInfo | None:
        """The worker that this failure proves lost."""
        if isinstance(error.__cause__, WorkerLost):  # prefill, while decode was waiting for its KV
            return self.prefill
        return self.asked[-1] if isinstance(error, WorkerLost) and self.asked else None

    def note_failure(self, error: BatonError) -> None:
        """Record which worker to avoid. Raises the error if the request cannot be retried."""
        if not (error.retryable or isinstance(error, NoWorkers)):
            raise error
        if isinstance(error, NotResumable):
            if self.is_replayed:
                raise error
            self.is_replayed = True
        if self.time_left_s <= 0:
            raise DeadlineExceeded
        self.is_handed_off |= self.prefill not in (None, *self.asked[-1:])
        if not isinstance(error, _BLAMELESS):  # the request is not the cause
            self._count(error)
        blamed = self._blamed(error)
        if blamed is not None:
            self.avoided.add(blamed.incarnation)
        self.is_stalled |= isinstance(error, HandoffStalled)
        self.asked.clear()
        self.prefill = None
        self.error = error

    async def forgive(self) -> None:
        """Avoid no worker any more, after a pause. Raises the last error if it refused a new request."""
        if self.error is not None and self._is_refusal(self.error):
            if not self._is_running:
                raise self.error
            await asyncio.sleep(self.error.retry_after_s or 1.0)  # until a queue may have room
        else:
            await asyncio.sleep(_PAUSE_S * 2**self._num_failures)  # so that failing at once does not spin
        self.avoided.clear()

    def ended_by(self, error: BatonError) -> BatonError:
        """What a request ends with that has waited in vain."""
        if self.time_left_s <= 0:
            return DeadlineExceeded()
        return error if self.error is None or isinstance(self.error, BrokerLost) else self.error

    def _count(self, error: BatonError) -> None:
        """Count a failure, except that a running answer may be refused until its deadline. Raises the last
        one that is allowed.
        """
        if len(self.token_ids) - self._num_tokens_before >= _ENOUGH_TOKENS:
            self._num_failures = 0
            self.avoided.clear()
        self._num_tokens_before = len(self.token_ids)
        self._num_failures += not (self._is_refusal(error) and self._is_running)
        if self._num_failures == MAX_ATTEMPTS:
            raise error

    def _blamed(self, error: BatonError) -> WorkerInfo | None:
        """The worker to avoid. A failed handoff is blamed on the prefill worker, as is one that no decode
        worker can take; the decode worker that reported it stays eligible.
        """
        match error:
            case BrokerLost() | NotResumable():
                return None
            case NoWorkers():
                return self.prefill
            case HandoffFailed():
                return self.prefill or self.asked[-1]
            case _:
                return self.asked[-1]

    @staticmethod
    def _is_refusal(error: BatonError) -> bool:
        return isinstance(error, Overloaded | NotReady)
