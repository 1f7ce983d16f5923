"""What an adapter does for the library engine, and one request inside a library."""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Coroutine, Sequence, Set
from typing import Any, Protocol, TypeVar

from baton.errors import BatonError, DeadlineExceeded
from baton.messages import FinishReason, GenerateRequest, TokenChunk, TokenLogprob, Usage, WorkerStats
from workers.durations import Durations
from workers.engine import EngineInfo
from workers.engines.library.model_facts import ModelFacts
from workers.settings import Loaded

T = TypeVar("T")

_NO_LOGPROB = -9999.0  # OpenAI's value for "very unlikely", here for unreported ones


@dataclasses.dataclass(eq=False, kw_only=True)
class Call:
    """A request from its submission until the library holds nothing of it.

    `max_tokens` are left to generate. `hands_over`: prefill, whose KV is kept; `transfer`: decode, with the
    parameters of kept KV. `num_cached_tokens`: prefill's count, or the library's from the first chunk on.
    `num_lacking` is an estimate, see `Engine.num_lacking_tokens`. `error` ends the call.

    The adapter sets `result`, the library's object, `prompt_logprobs`, `is_over` when the library has ended
    the request, and `spent` by the library's own figures, if it has them, before the first chunk. Of KV that
    the library keeps for decode it sets `kept`, the parameters for the other side, `num_kept_blocks`, and
    `is_continued` if decode goes on after prefill's first token instead of sampling it again."""

    id: str
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
    error: BatonError | None = None
    result: Any = None
    kept: dict[str, Any] | None = None
    num_kept_blocks: int = 0
    is_continued: bool = False
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    is_over: bool = False
    spent: Durations = dataclasses.field(default_factory=Durations)
    _waiting: asyncio.Timeout | None = None

    async def wait(self, work: Coroutine[Any, Any, T], until: float) -> T:
        """Run `work`. Raises DeadlineExceeded at this time of the event loop, or `error` once it is set."""
        if (error := self.error) is not None:
            work.close()
            raise error
        waiting = self._waiting = asyncio.timeout_at(until)
        try:
            async with waiting:
                result = await work
        except TimeoutError:
            if not waiting.expired():
                raise  # the library's own
            raise self.error or DeadlineExceeded() from None
        finally:
            self._waiting = None
        if self.error is not None:
            raise self.error
        return result

    def end_with(self, error: BatonError) -> None:
        """Make the pending or next wait raise `error`."""
        self.error = error
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def chunk(
        self,
        token_ids: Sequence[int],
        reason: FinishReason | None,
        num_cached_tokens: int,
        reported: Sequence[dict[int, Any]] | None = None,
    ) -> TokenChunk:
        """The chunk of these tokens; until there are tokens, and at the end, with usage over all attempts.
        `reported`: the library's log probabilities by token id, per token."""
        is_first = self.num_new_tokens == 0
        self.num_new_tokens += len(token_ids)
        usage = logprobs = None
        if is_first or reason is not None:
            if self.num_cached_tokens is None:
                self.num_cached_tokens = num_cached_tokens
            if is_first and not any(self.spent.parts):  # the library has no figures
                self.spent.lap("computed_s" if self.transfer is None else "moved_s")
            num_prompt = self.request.num_prompt_tokens
            num_generated = self.request.num_generated + self.num_new_tokens
            num_cached = min(self.num_cached_tokens, num_prompt)
            usage = Usage(num_prompt, num_cached, num_generated, None, *self.spent.parts)
        if (num_top := self.request.sampling.logprobs) is not None:
            logprobs = token_logprobs(token_ids, reported, num_top)
        scored = self.prompt_logprobs if reason is not None else None
        return TokenChunk(tuple(token_ids), reason, usage, logprobs, scored)


class Adapter(Protocol):
    """One library in this process, for one role."""

    label: str
    version: str
    model: ModelFacts
    loaded: Loaded[dict[str, Any]]

    def load(self, on_failed_pull: Callable[[], None]) -> None:
        """Load the model; blocks the loop for minutes. `on_failed_pull`: the library could not read some
        request's KV, and does not report which. Raises whatever the library raises."""
        ...

    async def start(self) -> tuple[EngineInfo, float, int]:
        """Run first requests, so that lazy initialisation precedes the first client. Also returns how many
        seconds handed-over KV is kept, and about how many tokens the prefix cache holds. Raises as above."""
        ...

    def submit(self, call: Call) -> None:
        """Start a request. Raises BatonError, WorkerLost if the library failed and no single request is the
        cause. Any other error ends this request only."""
        ...

    async def step(self, call: Call) -> TokenChunk:
        """The next tokens, see `Call.chunk`; sets `kept` for a prompt that is handed over. Raises BatonError
        if the library ended the request otherwise, or whatever the library raises."""
        ...

    async def abort(self, call: Call) -> bool:
        """Abort the request if it runs, and free its kept KV if the library can. False if KV may be in
        transit: try again after the next step."""
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


def token_logprobs(
    token_ids: Sequence[int], reported: Sequence[dict[int, Any]] | None, num_top: int
) -> tuple[TokenLogprob, ...]:
    """One entry per token, with its `num_top` likeliest; the last tokens may be unreported."""
    found = []
    for token_id, entries in zip(token_ids, itertools.chain(reported or (), itertools.repeat({}))):  # noqa: B905  endless
        logprobs = {i: float(entry.logprob) for i, entry in entries.items()}
        best = sorted(logprobs.items(), key=lambda pair: -pair[1])
        found.append(TokenLogprob(token_id, logprobs.get(token_id, _NO_LOGPROB), tuple(best[:num_top])))
    return tuple(found)
