"""The mocker: a timing model with deterministic tokens, for load tests of the serving plane."""

import asyncio
import dataclasses
import math
import zlib
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from baton.errors import DeadlineExceeded, HandoffFailed, InvalidRequest, NotReady, Overloaded, WorkerLost
from baton.messages import (
    UNDECODABLE,
    FinishReason,
    GenerateRequest,
    Guided,
    KvHandoff,
    TokenChunk,
    Usage,
    WorkerStats,
)
from workers.durations import Durations
from workers.engine import EngineInfo
from workers.engines.prefixes import Chain, HeldPrefixes
from workers.engines.script import Script, Vocabulary, log_prompt
from workers.flags import Speculate
from workers.kv.memory import host_memory
from workers.kv.transceiver import CacheTransceiver, Ticket
from workers.settings import AtLeastOne, NotNegative, require

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MockerSettings:
    """The timing model. Prompts share `prefill_tokens_per_s`, first come, first served. A decode step takes
    `decode_step_ms`, for any batch size; while answers go on, steps keep time.
    The KV of the last `max_cached_tokens` is found again, in blocks of 16 tokens.
    `script` is a file of answers to play; see `workers.engines.script`. `prompt_log` is a file to which the
    token ids of each prompt are appended, one JSON line each. While the file `hang_while` exists, the engine
    hangs: its worker only sends heartbeats. `speculate` must be left out."""

    prefill_tokens_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e12)] = 50_000.0
    decode_step_ms: Milliseconds = 10.0
    kv_transfer_ms: Milliseconds = 1.0
    handoff_ttl_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 60.0
    max_batch_size: AtLeastOne = 1024
    max_queue_size: NotNegative = 4096
    max_seq_len: Annotated[int, msgspec.Meta(ge=2)] = 131_072
    max_cached_tokens: NotNegative = 1_000_000
    script: str | None = None
    prompt_log: str | None = None
    hang_while: str | None = None
    speculate: Speculate | None = None

    def __post_init__(self) -> None:
        require(self.speculate is None, "speculate", self.speculate, "left out: no model draws the tokens")

    @property
    def is_hung(self) -> bool:
        return self.hang_while is not None and Path(self.hang_while).exists()


class SharedRate:
    """Work is done in turn, each piece at the whole rate."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._turn = asyncio.Lock()
        self._free_s = 0.0  # when the piece in work ends

    async def work(self, amount: float, spent: Durations) -> None:
        """Return when this much is done, after the pieces before it; a cancelled piece takes no more time."""
        now_s = asyncio.get_running_loop().time
        is_busy = self._turn.locked()
        async with self._turn:
            spent.lap("waited_s")
            # The next piece starts when the one before it ends, not when a late timer says so.
            began_s = min(self._free_s, now_s()) if is_busy else now_s()
            self._free_s = began_s + amount / self._per_s
            await asyncio.sleep(self._free_s - now_s())
            spent.lap("computed_s")


Answer = tuple[Callable[[int], int], int, FinishReason]
"""Gives the id at a position; the number of tokens, and why it ends."""

_HEADER = "<|channel|>final<|message|>"  # of every answer
_BLOCK = 16
_HUNG_S = 0.05
_Offered = tuple[Ticket, int]  # the `engine_state`: the ticket, and how many tokens were cached


class MockerEngine:
    """Every running request gets one token per step, all in the same turn of the event loop.

    An answer is the header of a final message, then vocabulary words in order, starting at a point that
    depends on the prompt; it ends at max_tokens only. With a script, the script defines it. Handoffs are
    real: the KV of a token is its id, and decode pulls what it has not cached."""

    def __init__(self, settings: MockerSettings, *, model_path: Path, transceiver: CacheTransceiver) -> None:
        self._settings, self._model_path = settings, model_path
        self._transceiver = transceiver
        self._script: Script | None = None
        self._vocabulary: Vocabulary  # once started
        self._held = HeldPrefixes(_BLOCK, settings.max_cached_tokens // _BLOCK)
        self._slots = asyncio.Semaphore(settings.max_batch_size)
        self._prefilling = SharedRate(settings.prefill_tokens_per_s)
        self._waiting: list[asyncio.Future[None]] = []  # answers, for the next step
        self._due_s = -math.inf  # when the last step was to end
        self._is_running = False
        self._figures: dict[str, int] = dict.fromkeys(WorkerStats.__struct_fields__, 0)

    async def start(self) -> EngineInfo:
        """Read the vocabulary for answers. Raises OSError, ValueError if it is missing or invalid."""
        path = self._model_path / "tokenizer.json"
        self._vocabulary = await asyncio.to_thread(Vocabulary, path)
        if self._settings.script is not None:
            self._script = Script(Path(self._settings.script), self._vocabulary)
        await self._transceiver.start()
        self._is_running = True
        return EngineInfo(
            is_simulated=True,
            engine="mocker",
            engine_version="1",
            context_length=self._settings.max_seq_len,
            kv_transfer=self._transceiver.transport_name,
            max_batch_size=self._settings.max_batch_size,
            max_queue_size=self._settings.max_queue_size,
        )

    async def prefill(self, request: GenerateRequest) -> AsyncGenerator[KvHandoff | TokenChunk, None]:
        """Yield the handoff after the prompt's simulated time; pinned until it is pulled."""
        async with self._slot(request) as (deadline, spent):
            num_cached = await self._run_prompt(request, deadline, spent)
            self._held.hold(Chain(request.cache_salt), request.token_ids)
            token, num_tokens, _ = answer = self._answer(request)
            if request.num_generated + 1 >= num_tokens:
                yield self._last_chunk(answer, _usage(request, (num_cached, 0), num_tokens, spent))
                return
            ticket = self._transceiver.offer(host_memory(_kv(request.token_ids)))
            ttl_s = min(self._settings.handoff_ttl_s, deadline - asyncio.get_running_loop().time())
            self._figures["num_handoffs"] += 1
            self._figures["kv_pinned_blocks"] += 1
            try:
                yield KvHandoff(
                    first_token=token(request.num_generated),
                    num_prompt_tokens=request.num_prompt_tokens,
                    ttl_s=ttl_s,
                    engine_state=msgspec.msgpack.encode((ticket, num_cached)),
                    waited_s=spent.waited_s,
                    computed_s=spent.computed_s,
                )
                num_bytes = await asyncio.wait_for(self._transceiver.moved(ticket), ttl_s)
                self._figures["kv_moved_bytes"] += num_bytes
            except TimeoutError:
                self._figures["num_handoffs_expired"] += 1
                raise HandoffFailed(f"The KV was not pulled in {ttl_s:.3g} s.") from None
            finally:
                self._transceiver.withdraw(ticket)
                self._figures["kv_pinned_blocks"] -= 1

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield one token per step, starting when the prompt is processed or has arrived."""
        async with self._slot(request) as (deadline, spent):
            if request.handoff is None:
                spared = await self._run_prompt(request, deadline, spent), 0
            else:
                spared = await self._take_over(request, request.handoff, deadline)
                spent.lap("moved_s")
            chain = Chain(request.cache_salt)
            self._held.hold(chain, request.token_ids)
            token, num_tokens, _ = answer = self._answer(request)
            loop, token_ids = asyncio.get_running_loop(), list(request.token_ids)
            usage: Usage | None = _usage(request, spared, request.num_generated + 1, spent)
            for token_id in map(token, range(request.num_generated, num_tokens - 1)):
                self._figures["num_generated_tokens"] += 1
                token_ids.append(token_id)
                yield TokenChunk((token_id,), None, usage)
                usage = None  # only of the first chunk and the last
                await self._next_step(loop)
                if not self._is_running:
                    raise WorkerLost("The worker is stopping.")
                if loop.time() > deadline:
                    raise DeadlineExceeded
            self._held.hold(chain, token_ids)  # the last token has no KV yet
            yield self._last_chunk(answer, _usage(request, spared, num_tokens, spent))

    def num_lacking_tokens(self, request: GenerateRequest) -> int:
        return len(request.token_ids) - self._num_held(request)

    def stats(self) -> WorkerStats:
        return WorkerStats(**self._figures | {"kv_cached_blocks": len(self._held)})

    async def failed(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def stop(self) -> None:
        if self._is_running:
            self._is_running = False
            self._step()
            await self._transceiver.close()

    @asynccontextmanager
    async def _slot(self, request: GenerateRequest) -> AsyncGenerator[tuple[float, Durations], None]:
        """A place in the batch, after waiting in the queue; yields the deadline in the loop's time."""
        spent = Durations()
        if not self._is_running:
            raise NotReady("The engine is not running.")
        num_tokens, limit = len(request.token_ids), self._settings.max_seq_len
        if num_tokens >= limit:
            raise InvalidRequest(f"The prompt has {num_tokens} tokens; the context length is {limit}.")
        if self._script is None:
            _check_form(request.sampling.guided)
        if request.sampling.prompt_logprobs is not None:
            raise InvalidRequest("The mocker has no log probabilities of the prompt.", param="echo")
        if self._slots.locked() and self._figures["num_waiting"] >= self._settings.max_queue_size:
            raise Overloaded("The worker's queue is full; retry later.", retry_after_s=1)
        deadline = asyncio.get_running_loop().time() + request.deadline_s
        with self._counted("num_waiting"):
            await _within(deadline, self._slots.acquire())
        spent.lap("waited_s")
        try:
            with self._counted("num_running"), self._counted("kv_used_blocks"):
                while self._settings.is_hung:
                    await _within(deadline, asyncio.sleep(_HUNG_S))
                yield deadline, spent
        finally:
            self._slots.release()

    @contextmanager
    def _counted(self, figure: str) -> Iterator[None]:
        self._figures[figure] += 1
        try:
            yield
        finally:
            self._figures[figure] -= 1

    async def _run_prompt(self, request: GenerateRequest, deadline: float, spent: Durations) -> int:
        """Takes the prompt's simulated time; returns how many of its tokens were cached."""
        num_held = self._num_held(request)
        num_lacking = len(request.token_ids) - num_held
        if self._settings.prompt_log is not None:
            log_prompt(Path(self._settings.prompt_log), request.token_ids[: request.num_prompt_tokens])
        await _within(deadline, self._prefilling.work(num_lacking, spent))
        self._figures["num_prompt_tokens"] += num_lacking
        self._figures["num_cached_tokens"] += num_held
        return num_held

    def _num_held(self, request: GenerateRequest) -> int:
        """Tokens that need not be computed or pulled: never the last, which gives the first logits."""
        return self._held.num_held(request.token_ids[:-1], request.cache_salt)

    async def _take_over(
        self, request: GenerateRequest, handoff: KvHandoff, deadline: float
    ) -> tuple[int, int]:
        """Pulls the KV that is not cached; returns (tokens that prefill had cached, bytes pulled)."""
        try:
            ticket, num_cached = msgspec.msgpack.decode(handoff.engine_state, type=_Offered)
        except UNDECODABLE as error:
            raise HandoffFailed("The handoff was not written by a mocker.") from error
        expected = _kv(request.token_ids[self._num_held(request) :])
        pulled = bytearray(len(expected))
        left_s = min(handoff.ttl_s, deadline - asyncio.get_running_loop().time())
        await asyncio.sleep(self._settings.kv_transfer_ms / 1e3)  # as long as a real transfer
        await self._transceiver.pull(ticket, host_memory(pulled), left_s)
        if pulled != expected or handoff.num_prompt_tokens != request.num_prompt_tokens:
            raise HandoffFailed("The handoff is for another prompt.")
        self._figures["num_handoffs"] += 1
        self._figures["kv_moved_bytes"] += len(pulled)
        return num_cached, len(pulled)

    def _answer(self, request: GenerateRequest) -> Answer:
        num_prompt = request.num_prompt_tokens
        limit = min(request.sampling.max_tokens, self._settings.max_seq_len - num_prompt)
        scripted = () if self._script is None else self._script.answer(request.token_ids[:num_prompt])
        if scripted:
            is_whole = len(scripted) <= limit
            return scripted.__getitem__, min(limit, len(scripted)), "stop" if is_whole else "length"
        # Four bytes determined by the prompt, without generated tokens.
        checksum = zlib.crc32(repr((num_prompt, request.token_ids[: min(8, num_prompt)])).encode())
        start, header = checksum + request.sampling.choice, self._vocabulary.header
        words = self._vocabulary.words

        def token(position: int) -> int:
            is_header = position < len(header)
            return header[position] if is_header else words[(start + position) % len(words)]

        return token, limit, "length"

    def _last_chunk(self, answer: Answer, usage: Usage) -> TokenChunk:
        token, num_tokens, finish_reason = answer
        self._figures["num_generated_tokens"] += 1
        return TokenChunk((token(num_tokens - 1),), finish_reason, usage)

    def _next_step(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Completed at the end of the running step. The first answer that waits starts one: where the last
        one was due, or now if a whole step has passed since."""
        if not self._waiting:
            step_s, now_s = self._settings.decode_step_ms / 1e3, loop.time()
            due_s = self._due_s + step_s
            self._due_s = due_s if due_s > now_s else now_s + step_s
            loop.call_at(self._due_s, self._step)
        ended = loop.create_future()
        self._waiting.append(ended)
        return ended

    def _step(self) -> None:
        if self._is_running and self._settings.is_hung:
            asyncio.get_running_loop().call_later(_HUNG_S, self._step)
            return
        waiting, self._waiting = self._waiting, []
        for ended in waiting:
            if not ended.done():
                ended.set_result(None)


async def _within(deadline: float, work: Coroutine[Any, Any, object]) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await work
    except TimeoutError:
        raise DeadlineExceeded from None


def _check_form(form: Guided | None) -> None:
    """Raise InvalidRequest unless the answer, a final message with any text, matches the form."""
    if form is None or any(_HEADER in last.headers and last.grammar is None for last in form.last):
        return
    param = next((last.param for last in form.last if last.param is not None), None)
    raise InvalidRequest(
        f"`{param}` cannot be enforced: the mocker is an engine without a model.", param=param
    )


def _usage(request: GenerateRequest, spared: tuple[int, int], num_tokens: int, spent: Durations) -> Usage:
    """`spared`: cached tokens, moved bytes."""
    num_cached = min(spared[0], request.num_prompt_tokens)
    return Usage(request.num_prompt_tokens, num_cached, num_tokens, spared[1], *spent.parts)


def _kv(token_ids: Sequence[int]) -> bytearray:
    return bytearray(array("I", token_ids).tobytes())
