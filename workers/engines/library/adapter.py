"""What an adapter does for the library engine, and one request inside a library."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence, Set
from typing import Any, Protocol, TypeVar

from baton.errors import BatonError, DeadlineExceeded, HandoffFailed
from baton.messages import FinishReason, GenerateRequest, TokenChunk, TokenLogprob, Usage, WorkerStats
from workers.engine import EngineInfo
from workers.settings import Loaded

T = TypeVar("T")


class Ending:
    """Ends a request's wait at a given time, or with `error` once it is set from outside."""

    def __init__(self) -> None:
        self.error: BatonError | None = None
        self._waiting: asyncio.Timeout | None = None

    async def wait(self, work: Coroutine[Any, Any, T], until: float, late: Callable[[], BatonError]) -> T:
        """Run `work` until this time of the event loop: raises `late()` then, or `error`."""
        if self.error is not None:
            work.close()
            raise self.error
        waiting = self._waiting = asyncio.timeout_at(until)
        try:
            async with waiting:
                result = await work
        except TimeoutError:
            if not waiting.expired():
                raise  # the library's own
            raise self._ended_or(late()) from None
        finally:
            self._waiting = None
        if self.error is not None:
            raise self.error
        return result

    def _ended_or(self, error: BatonError) -> BatonError:
        return self.error if self.error is not None else error

    def end_with(self, error: BatonError) -> None:
        """Make the pending or next wait raise `error`."""
        self.error = error
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())


@dataclasses.dataclass(frozen=True)
class Kept:
    """The KV that a library keeps for decode: its parameters for the other side, its blocks, and whether
    decode goes on after prefill's first token instead of sampling it again.
    """

    params: dict[str, Any]
    num_blocks: int
    is_continued: bool = False


class Answer(Protocol):
    """One request that a library has accepted."""

    async def step(self) -> TokenChunk:
        """The next tokens, see `Call.chunk`. Raises BatonError if the library ended the request otherwise,
        or whatever the library raises.
        """
        ...

    def kept(self) -> Kept | None:
        """The KV of a prompt that is handed over, after its step; None: the library kept none."""
        ...

    def release(self) -> None:
        """Free that KV, if the library can. Does not wait."""
        ...

    async def abort(self) -> bool:
        """Abort the request if it runs; False if its KV may be in transit: try again after the next step."""
        ...


@dataclasses.dataclass(eq=False, kw_only=True)
class Call:
    """A request from its submission until the library holds nothing of it.

    `max_tokens` are left to generate. `hands_over`: prefill, whose KV is kept; `transfer`: decode, with the
    parameters of kept KV. `num_cached_tokens`: prefill's count, or the library's from the first chunk on.
    `num_lacking` is an estimate, see `Engine.num_lacking_tokens`.
    """

    request: GenerateRequest
    max_tokens: int
    deadline: float
    cache_salt: str
    num_lacking: Callable[[], int]
    hands_over: bool = False
    transfer: dict[str, Any] | None = None
    num_cached_tokens: int | None = None
    num_new_tokens: int = 0
    has_answered: bool = False
    kept: Kept | None = None
    ending: Ending = dataclasses.field(default_factory=Ending)
    answer: Answer = dataclasses.field(init=False)

    async def step(self, late: Callable[[], BatonError] = DeadlineExceeded) -> TokenChunk:
        """The next chunk. Raises `late()` at the deadline, the error that ended the call, or the answer's."""
        chunk = await self.ending.wait(self.answer.step(), self.deadline, late)
        self.has_answered = True
        return chunk

    async def stay_pinned(self, ttl_s: float) -> None:
        """Wait to be closed. Raises HandoffFailed at the time limit, or the error that ended the call."""
        until = asyncio.get_running_loop().time() + ttl_s
        await self.ending.wait(
            asyncio.Event().wait(),
            until,
            lambda: HandoffFailed(f"no decode worker took the KV within {ttl_s:.3g} s"),
        )

    def chunk(
        self,
        token_ids: Sequence[int],
        reason: FinishReason | None,
        num_cached_tokens: int,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        prompt_logprobs: tuple[TokenLogprob, ...] | None = None,
    ) -> TokenChunk:
        """The chunk of these tokens; until there are tokens, and at the end, with usage over all attempts."""
        is_first = self.num_new_tokens == 0
        self.num_new_tokens += len(token_ids)
        usage = None
        if is_first or reason is not None:
            if self.num_cached_tokens is None:
                self.num_cached_tokens = num_cached_tokens
            num_prompt = self.request.num_prompt_tokens
            num_generated = self.request.num_generated + self.num_new_tokens
            usage = Usage(num_prompt, min(self.num_cached_tokens, num_prompt), num_generated)
        return TokenChunk(tuple(token_ids), reason, usage, logprobs, prompt_logprobs)


@dataclasses.dataclass(frozen=True)
class Facts:
    """A loaded library. `keep_s`: how long it keeps handed-over KV. `num_reused_tokens`: the estimated size
    of its prefix cache.
    """

    info: EngineInfo
    keep_s: float
    num_reused_tokens: int


class Adapter(Protocol):
    """One library in this process, for one role. `is_positional`: what a seed draws depends on a token's
    place, so that sampled answers resume exactly.
    """

    label: str
    version: str
    loaded: Loaded[dict[str, Any]]
    is_positional: bool

    def load(self, on_failed_pull: Callable[[], None]) -> None:
        """Load the model; blocks the loop for minutes. `on_failed_pull`: the library could not read some
        request's KV, and does not report which. Raises whatever the library raises.
        """
        ...

    async def start(self) -> Facts:
        """Run first requests, so that lazy initialisation precedes the first client. Raises as above."""
        ...

    def submit(self, call: Call) -> Answer:
        """Start a request. Raises BatonError, WorkerLost if the library failed and no single request is the
        cause. Any other error ends this request only.
        """
        ...

    def failure(self, error: Exception, call: Call) -> BatonError:
        """The client's error for one that the library raised; WorkerLost if no single request caused it."""
        ...

    def figures(self, calls: Set[Call]) -> WorkerStats:
        """Running and waiting requests, and KV blocks, given the open calls."""
        ...

    async def died(self) -> str:
        """Wait until the library is dead, and return the reason."""
        ...

    async def stop(self, *, is_broken: bool) -> None:
        """Shut the library down, if it was loaded."""
        ...
