"""One request inside TensorRT-LLM: its steps, deadline, safe abort, chunks and errors."""

import asyncio
import dataclasses
import enum
import logging
from collections.abc import Callable

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailure,
    HandoffFailed,
    InvalidRequest,
    WorkerLost,
)
from baton.messages import FinishReason, GenerateRequest, TokenChunk, TokenLogprob, Usage
from workers.engines.calls import Ending
from workers.engines.logprobs import token_logprobs
from workers.engines.trtllm.library import Completion, Result

log = logging.getLogger(__name__)

# How TensorRT-LLM marks guided decoding errors, and phrases in those that the form does not cause.
_GRAMMAR_ERROR = "Guided decoding error"
_NOT_OF_THE_FORM = ("internal error", "failed to accept", "still pending", "no precompiled grammar")


class Abort(enum.Enum):
    """When a request may be aborted: an abort during a KV transfer would corrupt or hang the engine."""

    ANY_TIME = "it moves no KV"
    ONCE_ANSWERED = "it receives KV: its first response means that all has arrived"
    UNTIL_ANSWERED = "it sends KV: the transfer may start with its only response, and its end is not reported"


@dataclasses.dataclass(eq=False)
class Call:
    """A request from submission until the engine releases it. `cursor` counts the tokens already yielded."""

    request: GenerateRequest
    result: Result
    deadline: float
    abort: Abort = Abort.ANY_TIME
    num_cached_tokens: int | None = None
    has_answered: bool = False
    is_over: bool = False
    cursor: int = 0
    is_pinned: bool = False
    ending: Ending = dataclasses.field(default_factory=Ending)

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV it holds."""
        return len(self.request.token_ids) + self.cursor

    async def step(self) -> Completion:
        """Wait for the next response, always the same object. Raises DeadlineExceeded, the error that ended
        the call, or whatever the engine raises.
        """
        return await self.ending.wait(self._next(), self.deadline, DeadlineExceeded())

    async def _next(self) -> Completion:
        try:
            await self.result.__anext__()
        except AssertionError:  # TensorRT-LLM rejects a response that arrived; the request goes on
            self._note_response(is_last=False)
            raise
        except Exception:  # re-raised; nothing is left to abort
            self.is_over = True
            raise
        (output,) = self.result.outputs
        self._note_response(is_last=output.finish_reason is not None)
        return output

    def _note_response(self, *, is_last: bool) -> None:
        self.has_answered = True
        self.is_over = is_last or self.abort is Abort.UNTIL_ANSWERED

    def abort_if_safe(self) -> bool:
        """Abort it unless it is over; False if its KV may be in transit. Does not wait. An abort that crosses
        a handoff's response is refused: TensorRT-LLM keeps the KV until its timeout.
        """
        if self.is_over:
            return True
        if self.abort is Abort.ONCE_ANSWERED and not self.has_answered:
            return False
        self.result.abort()
        self.is_over = True
        return True

    async def stay_pinned(self, ttl_s: float) -> None:
        """Wait to be closed. Raises HandoffFailed at the time limit, or the error that ended the call."""
        self.is_pinned = True
        try:
            await self.ending.pinned(ttl_s)
        finally:
            self.is_pinned = False

    def chunk(self, output: Completion) -> TokenChunk:
        """The tokens since the last step. Raises the error of a failed finish reason."""
        reason = finish_reason(output)
        if reason == "length" and self.ends_with_stop_token(output):
            reason = "stop"  # the last allowed token was a stop token
        token_ids = output.token_ids[self.cursor :]
        if reason == "stop":
            token_ids = self._with_stop_token(token_ids, output)
        logprobs = self._logprobs(token_ids, output)
        is_first = self.cursor == 0
        self.cursor += len(token_ids)
        usage = self._usage() if reason or is_first else None
        return TokenChunk(tuple(token_ids), reason, usage, logprobs)

    def ends_with_stop_token(self, output: Completion) -> bool:
        """Whether a stop token ended the answer. TensorRT-LLM checks max_tokens before stop tokens other than
        `end_id`: prefill, whose max_tokens is 1, reports `length`.
        """
        asked = self.request.sampling
        num_tokens = self.request.num_generated + len(output.token_ids)
        is_heeded = not asked.ignore_eos and num_tokens > asked.min_tokens
        return is_heeded and bool(output.token_ids) and output.token_ids[-1] in asked.stop_token_ids

    def _with_stop_token(self, token_ids: list[int], output: Completion) -> list[int]:
        """Add the stop token that ended the answer if this build omits it from the ids."""
        stops = self.request.sampling.stop_token_ids
        if not stops or (output.token_ids and output.token_ids[-1] in stops):
            return token_ids
        return [*token_ids, output.stop_reason if isinstance(output.stop_reason, int) else stops[0]]

    def _logprobs(self, token_ids: list[int], output: Completion) -> tuple[TokenLogprob, ...] | None:
        num_top = self.request.sampling.logprobs
        if num_top is None:
            return None
        told = (output.logprobs or [])[self.cursor : self.cursor + len(token_ids)]
        return token_logprobs(token_ids, told, num_top)

    def _usage(self) -> Usage:
        num_cached = self.num_cached_tokens
        return Usage(
            self.request.num_prompt_tokens,
            num_cached if num_cached is not None else self.result.cached_tokens,
            self.request.num_generated + self.cursor,
        )


def finish_reason(output: Completion) -> FinishReason | None:
    """Baton's finish reason, None for `not_finished`. Raises BatonError for failures."""
    match output.finish_reason:
        case None | "not_finished":
            return None
        case "stop":
            return "stop"
        case "length":
            return "length"
        case "timeout":
            raise DeadlineExceeded
        case other:
            raise WorkerLost(f"TensorRT-LLM ended the request: {other}")


def as_error(error: Exception, call: Call) -> BatonError:
    """The client's error for one that the request's step raised."""
    form, text = call.request.sampling.guided, str(error).strip()
    if form is not None and _GRAMMAR_ERROR in text and not any(words in text for words in _NOT_OF_THE_FORM):
        params = {message.param for message in form.last if message.grammar is not None}
        return InvalidRequest(
            f"the schema does not compile: {text}", param=params.pop() if len(params) == 1 else None
        )
    if call.abort is Abort.ONCE_ANSWERED and not call.has_answered:
        return HandoffFailed(f"the KV did not arrive: {text}")
    return EngineFailure(f"TensorRT-LLM failed on this request: {text or type(error).__name__}")


async def let_go(call: Call, timeout_s: float, on_wedged: Callable[[str], None]) -> None:
    """Wait for the first response of an abandoned call, then abort the rest.

    TensorRT-LLM promises that a transfer ends within the KV timeout; one that takes longer than `timeout_s`
    has wedged the engine (upstream issues 12313, 13713), and `on_wedged` is called.
    """
    request_id = call.request.request_id
    call.deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        await call.step()
    except DeadlineExceeded:
        on_wedged(f"request {request_id} did not end within {timeout_s:g} s after it was abandoned")
    except Exception as error:  # noqa: BLE001  no client is waiting, and the watchdog detects a dead engine
        log.info("abandoned request ended request_id=%s error=%r", request_id, error)
    call.abort_if_safe()
