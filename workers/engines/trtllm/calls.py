"""One request inside TensorRT-LLM: read step by step, ended by what comes first, aborted only when safe."""

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

# How TensorRT-LLM's errors of guided decoding begin, and what those say that are not the form's fault.
_GRAMMAR_ERROR = "Guided decoding error"
_NOT_OF_THE_FORM = ("internal error", "failed to accept", "still pending", "no precompiled grammar")


class Abort(enum.Enum):
    """When a request may be aborted: in the middle of a transfer that would corrupt or hang the engine."""

    ANY_TIME = "it moves no KV"
    ONCE_ANSWERED = "it takes KV over: its first response says that all has arrived"
    UNTIL_ANSWERED = "it hands KV over: with its one response the transfer may begin, and nobody says when"


@dataclasses.dataclass(eq=False)
class Call:
    """A request from its submission until the engine has let go of it. `cursor` counts the tokens seen."""

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
        """Tokens whose KV it holds."""
        return len(self.request.token_ids) + self.cursor

    async def step(self) -> Completion:
        """The next response; TensorRT-LLM gives the same object every time. Raises what ended the call:
        DeadlineExceeded, what it was ended with, or whatever the engine raises.
        """
        return await self.ending.wait(self._next(), self.deadline, DeadlineExceeded())

    async def _next(self) -> Completion:
        try:
            await self.result.__anext__()
        except AssertionError:  # of a response that TensorRT-LLM has got and does not like; it goes on
            self._note_response(is_last=False)
            raise
        except Exception:  # raised again; there is nothing left to abort
            self.is_over = True
            raise
        (output,) = self.result.outputs
        self._note_response(is_last=output.finish_reason is not None)
        return output

    def _note_response(self, *, is_last: bool) -> None:
        self.has_answered = True
        self.is_over = is_last or self.abort is Abort.UNTIL_ANSWERED

    def abort_if_safe(self) -> bool:
        """Abort it unless it is over; False if its KV may be on its way. Nothing is waited for. Should the
        response of a handoff cross the abort, TensorRT-LLM refuses, and keeps the KV until its timeout.
        """
        if self.is_over:
            return True
        if self.abort is Abort.ONCE_ANSWERED and not self.has_answered:
            return False
        self.result.abort()
        self.is_over = True
        return True

    async def stay_pinned(self, ttl_s: float) -> None:
        """Wait to be closed. Raises HandoffFailed when the time is over, or what it was ended with."""
        self.is_pinned = True
        try:
            await self.ending.pinned(ttl_s)
        finally:
            self.is_pinned = False

    def chunk(self, output: Completion) -> TokenChunk:
        """What came since the last step. Raises the error that a bad finish reason stands for."""
        reason = finish_reason(output)
        if reason == "length" and self.ends_with_stop_token(output):
            reason = "stop"  # the last token that was allowed was a stop token, too
        token_ids = output.token_ids[self.cursor :]
        if reason == "stop":
            token_ids = self._with_stop_token(token_ids, output)
        logprobs = self._logprobs(token_ids, output)
        self.cursor += len(token_ids)
        return TokenChunk(tuple(token_ids), reason, self._usage() if reason else None, logprobs)

    def ends_with_stop_token(self, output: Completion) -> bool:
        """Whether the answer so far is one that a stop token has ended. TensorRT-LLM looks at max_tokens
        before it looks at stop tokens other than `end_id`: prefill, whose max_tokens is 1, says `length`.
        """
        asked = self.request.sampling
        num_tokens = self.request.num_generated + len(output.token_ids)
        is_heeded = not asked.ignore_eos and num_tokens > asked.min_tokens
        return is_heeded and bool(output.token_ids) and output.token_ids[-1] in asked.stop_token_ids

    def _with_stop_token(self, token_ids: list[int], output: Completion) -> list[int]:
        """Builds differ in whether the token that ended the answer is among the ids; here it always is."""
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
        num_generated = self.request.num_generated
        num_cached = self.num_cached_tokens
        return Usage(
            len(self.request.token_ids) - num_generated,
            num_cached if num_cached is not None else self.result.cached_tokens,
            num_generated + self.cursor,
        )


def finish_reason(output: Completion) -> FinishReason | None:
    """Ours; `not_finished` is None. Raises BatonError for the ends that are none."""
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
    """What a request's own error, out of a step, means to the client."""
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
    """Wait for the first response of a call that nobody reads any more, then abort what is left of it.

    A transfer ends within the KV timeout, by TensorRT-LLM's promise; one that does not within `timeout_s`
    has wedged the engine (upstream issues 12313, 13713), and `on_wedged` is told.
    """
    request_id = call.request.request_id
    call.deadline, call.ending = asyncio.get_running_loop().time() + timeout_s, Ending()
    try:
        await call.step()
    except DeadlineExceeded:
        on_wedged(f"request {request_id} did not end {timeout_s:g} s after it was given up")
    except Exception as error:  # noqa: BLE001  nobody is left to tell, and the watchdog sees a dead engine
        log.info("request_id=%s given up, ended with %r", request_id, error)
    call.abort_if_safe()
