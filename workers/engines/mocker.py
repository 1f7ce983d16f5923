"""An engine without a model: a timing model and deterministic tokens, for load tests of the serving plane."""

import asyncio
import dataclasses
import json
import random
import zlib
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NotReady,
    Overloaded,
    WorkerLost,
)
from baton.messages import GenerateRequest, Guided, KvHandoff, TokenChunk, Usage, WorkerStats
from workers.engine import EngineInfo
from workers.kv.memory import host_memory
from workers.kv.transceiver import CacheTransceiver, Ticket

_HEADER = "<|channel|>final<|message|>"  # of every answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MockerSettings:
    """The timing model. A decode step takes `decode_step_ms` plus up to `jitter_ms`, whatever the batch."""

    prefill_tokens_per_s: float = 50_000.0
    decode_step_ms: float = 10.0
    jitter_ms: float = 0.0
    kv_transfer_ms: float = 1.0
    handoff_ttl_s: float = 60.0
    max_batch_size: int = 1024
    max_queue_size: int = 4096
    max_seq_len: int = 131_072
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.prefill_tokens_per_s, self.handoff_ttl_s) <= 0:
            raise ValueError("prefill_tokens_per_s, handoff_ttl_s: must be more than 0")
        if min(self.decode_step_ms, self.jitter_ms, self.kv_transfer_ms) < 0:
            raise ValueError("decode_step_ms, jitter_ms, kv_transfer_ms: must not be negative")


class MockerEngine:
    """Every running request gets one token in each step, all of them in the same turn of the event loop.

    An answer is the header of a final message, then words of the vocabulary in order, from a start that the
    prompt decides; it ends at max_tokens, never before. A handoff is real: a few bytes really move.
    """

    def __init__(
        self,
        settings: MockerSettings,
        *,
        model_path: Path,
        worker_id: str,
        incarnation: str,
        transceiver: CacheTransceiver,
    ) -> None:
        self._settings = settings
        self._model_path = model_path
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._transceiver = transceiver
        self._jitter = random.Random(settings.seed)  # noqa: S311  a timing model keeps no secrets
        self._header: tuple[int, ...] = ()
        self._words: tuple[int, ...] = ()
        self._slots = asyncio.Semaphore(settings.max_batch_size)
        self._next_step = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._figures: dict[str, int] = dict.fromkeys(WorkerStats.__struct_fields__, 0)

    async def start(self) -> EngineInfo:
        """Read the vocabulary that answers are made of. Raises OSError, ValueError if there is none."""
        path = self._model_path / "tokenizer.json"
        self._header, self._words = await asyncio.to_thread(_read_vocabulary, path)
        await self._transceiver.start()
        self._clock = asyncio.create_task(self._tick())
        return EngineInfo(
            name="mocker",
            version="1",
            context_length=self._settings.max_seq_len,
            kv_transfer=self._transceiver.transport_name,
        )

    async def prefill(self, request: GenerateRequest) -> AsyncGenerator[KvHandoff | TokenChunk, None]:
        """The handoff after the time that the prompt takes, pinned until it was pulled."""
        async with self._slot(request) as deadline:
            await self._run_prompt(request, deadline)
            if request.num_generated + 1 >= self._max_tokens(request):
                yield self._chunk(request, request.num_generated)
                return
            ticket = self._transceiver.offer(host_memory(bytearray(_checksum(request))))
            self._figures["num_handoffs"] += 1
            self._figures["kv_pinned_blocks"] += 1
            try:
                yield KvHandoff(
                    worker_id=self._worker_id,
                    incarnation=self._incarnation,
                    first_token=self._token(request, request.num_generated),
                    num_prompt_tokens=_num_prompt_tokens(request),
                    ttl_s=self._settings.handoff_ttl_s,
                    engine_state=msgspec.msgpack.encode(ticket),
                )
                await asyncio.wait_for(self._transceiver.moved(ticket), self._settings.handoff_ttl_s)
                self._figures["kv_moved_bytes"] += ticket.num_bytes
            except TimeoutError:
                self._figures["num_handoffs_expired"] += 1
                raise HandoffFailed(f"Nobody took the KV in {self._settings.handoff_ttl_s} s.") from None
            finally:
                self._transceiver.withdraw(ticket)
                self._figures["kv_pinned_blocks"] -= 1

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """One token a step; the first as soon as the prompt is done or has arrived."""
        async with self._slot(request) as deadline:
            if request.handoff is None:
                await self._run_prompt(request, deadline)
            else:
                await self._take_over(request, request.handoff, deadline)
            yield self._chunk(request, request.num_generated)
            for position in range(request.num_generated + 1, self._max_tokens(request)):
                await self._next_step.wait()
                if self._stopped.is_set():
                    raise WorkerLost("The worker is stopping.")
                if asyncio.get_running_loop().time() > deadline:
                    raise _overdue()
                yield self._chunk(request, position)

    def stats(self) -> WorkerStats:
        """Live figures; a running request uses one block, a handoff pins one."""
        return WorkerStats(**self._figures)

    async def failed(self) -> str:
        """Return if the clock broke, which would be a bug."""
        assert self._clock is not None
        await asyncio.wait([self._clock])
        return "the mocker's clock stopped"

    async def stop(self) -> None:
        """End what runs with WorkerLost, then the clock and the wire."""
        self._stopped.set()
        self._next_step.set()
        if self._clock is not None:
            self._clock.cancel()
            await asyncio.gather(self._clock, return_exceptions=True)
            self._clock = None
            await self._transceiver.close()

    @asynccontextmanager
    async def _slot(self, request: GenerateRequest) -> AsyncGenerator[float, None]:
        """A place in the batch; waits in the queue for one. Gives the deadline, in the loop's time."""
        if self._clock is None:
            raise NotReady("The engine is not running.")
        num_tokens, limit = len(request.token_ids), self._settings.max_seq_len
        if num_tokens >= limit:
            raise InvalidRequest(f"The prompt has {num_tokens} tokens; this worker's context is {limit}.")
        _check_form(request.sampling.guided)
        if self._slots.locked() and self._figures["num_waiting"] >= self._settings.max_queue_size:
            raise Overloaded("The worker's queue is full; try again later.", retry_after_s=1)
        deadline = asyncio.get_running_loop().time() + request.deadline_s
        with self._counted("num_waiting"):
            await _within(deadline, self._slots.acquire())
        try:
            with self._counted("num_running"), self._counted("kv_used_blocks"):
                yield deadline
        finally:
            self._slots.release()

    @contextmanager
    def _counted(self, figure: str) -> Iterator[None]:
        self._figures[figure] += 1
        try:
            yield
        finally:
            self._figures[figure] -= 1

    async def _run_prompt(self, request: GenerateRequest, deadline: float) -> None:
        self._figures["num_prompt_tokens"] += len(request.token_ids)
        prefill_s = len(request.token_ids) / self._settings.prefill_tokens_per_s
        await _within(deadline, asyncio.sleep(prefill_s))  # what a real prefill takes

    async def _take_over(self, request: GenerateRequest, handoff: KvHandoff, deadline: float) -> None:
        try:
            ticket = msgspec.msgpack.decode(handoff.engine_state, type=Ticket)
        except msgspec.DecodeError as error:
            raise HandoffFailed("The handoff was not written by a mocker.") from error
        checksum = bytearray(len(_checksum(request)))
        left_s = min(handoff.ttl_s, deadline - asyncio.get_running_loop().time())
        await asyncio.sleep(self._settings.kv_transfer_ms / 1e3)  # what a real transfer takes
        await self._transceiver.pull(ticket, host_memory(checksum), left_s)
        if bytes(checksum) != _checksum(request):
            raise HandoffFailed("The handoff belongs to another prompt.")
        self._figures["num_handoffs"] += 1
        self._figures["kv_moved_bytes"] += ticket.num_bytes

    def _max_tokens(self, request: GenerateRequest) -> int:
        return min(request.sampling.max_tokens, self._settings.max_seq_len - _num_prompt_tokens(request))

    def _chunk(self, request: GenerateRequest, position: int) -> TokenChunk:
        self._figures["num_generated_tokens"] += 1
        token_ids = (self._token(request, position),)
        if position + 1 < self._max_tokens(request):
            return TokenChunk(token_ids)
        return TokenChunk(token_ids, "length", Usage(_num_prompt_tokens(request), 0, position + 1))

    def _token(self, request: GenerateRequest, position: int) -> int:
        if position < len(self._header):
            return self._header[position]
        start = int.from_bytes(_checksum(request), "big") + request.sampling.choice
        return self._words[(start + position) % len(self._words)]

    async def _tick(self) -> None:
        while True:
            jitter_ms = self._jitter.random() * self._settings.jitter_ms
            await asyncio.sleep((self._settings.decode_step_ms + jitter_ms) / 1e3)  # a step
            step, self._next_step = self._next_step, asyncio.Event()
            step.set()


async def _within(deadline: float, work: Coroutine[Any, Any, object]) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await work
    except TimeoutError:
        raise _overdue() from None


def _overdue() -> BatonError:
    return DeadlineExceeded("The request's deadline is over; ask for less, or allow more time.")


def _check_form(form: Guided | None) -> None:
    """Raises InvalidRequest unless the answer, a final message of any text, happens to have the form."""
    if form is None or any(_HEADER in last.headers and last.schema is None for last in form.last):
        return
    param = next((last.param for last in form.last if last.param is not None), None)
    raise InvalidRequest(
        f"`{param}` cannot be enforced: this is the mocker, an engine without a model.", param=param
    )


def _num_prompt_tokens(request: GenerateRequest) -> int:
    return len(request.token_ids) - request.num_generated


def _checksum(request: GenerateRequest) -> bytes:
    """Four bytes that the prompt decides, whatever was generated since."""
    num_tokens = _num_prompt_tokens(request)
    return zlib.crc32(repr((num_tokens, request.token_ids[: min(8, num_tokens)])).encode()).to_bytes(4, "big")


def _read_vocabulary(path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(header of a final message, ids of plain words) of a byte-level BPE `tokenizer.json`."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    final = [vocabulary["final"]] if "final" in vocabulary else [vocabulary[letter] for letter in "final"]
    header = (special["<|channel|>"], *final, special["<|message|>"])
    words = sorted(
        id_ for text, id_ in vocabulary.items() if text.removeprefix("Ġ").isascii() and text.isalpha()
    )
    return header, tuple(words)
