"""An engine without a model: a timing model and deterministic tokens, for load tests of the serving plane."""

import asyncio
import dataclasses
import json
import random
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from baton.errors import DeadlineExceeded, HandoffFailed, InvalidRequest, Overloaded
from baton.messages import GenerateRequest, KvHandoff, TokenChunk, Usage, WorkerStats
from workers.engine import EngineInfo

HANDOFF_TTL_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MockerSettings:
    """The timing model. A decode step takes `decode_step_ms` plus up to `jitter_ms`, whatever the batch."""

    prefill_tokens_per_s: float = 50_000.0
    decode_step_ms: float = 10.0
    jitter_ms: float = 0.0
    kv_transfer_ms: float = 1.0
    max_batch_size: int = 1024
    max_queue_size: int = 4096
    max_seq_len: int = 131_072
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prefill_tokens_per_s <= 0:
            raise ValueError("prefill_tokens_per_s: must be more than 0")
        if min(self.decode_step_ms, self.jitter_ms, self.kv_transfer_ms) < 0:
            raise ValueError("decode_step_ms, jitter_ms, kv_transfer_ms: must not be negative")


class MockerEngine:
    """Every running request gets one token in each step, all of them in the same turn of the event loop.

    An answer is the header of a final message, then words of the vocabulary in order, from a start that the
    prompt decides; it ends at max_tokens, never before.
    """

    def __init__(
        self, settings: MockerSettings, *, model_path: Path, worker_id: str, incarnation: str
    ) -> None:
        self._settings = settings
        self._model_path = model_path
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._jitter = random.Random(settings.seed)  # noqa: S311  a timing model keeps no secrets
        self._header: tuple[int, ...] = ()
        self._words: tuple[int, ...] = ()
        self._slots = asyncio.Semaphore(settings.max_batch_size)
        self._next_step = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None
        self._figures = dict.fromkeys(WorkerStats.__struct_fields__, 0)

    async def start(self) -> EngineInfo:
        """Read the vocabulary that answers are made of. Raises OSError, ValueError if there is none."""
        path = self._model_path / "tokenizer.json"
        self._header, self._words = await asyncio.to_thread(_read_vocabulary, path)
        self._clock = asyncio.create_task(self._tick())
        return EngineInfo(
            name="mocker", version="1", context_length=self._settings.max_seq_len, kv_transfer="none"
        )

    async def prefill(self, request: GenerateRequest) -> AsyncGenerator[KvHandoff | TokenChunk, None]:
        """The handoff after the time that the prompt takes, pinned for the time that a transfer takes."""
        async with self._slot(request):
            await self._run_prompt(request)
            if request.num_generated + 1 >= request.sampling.max_tokens:
                yield self._chunk(request, request.num_generated)
                return
            self._figures["num_handoffs"] += 1
            self._figures["kv_pinned_blocks"] += 1
            try:
                yield KvHandoff(
                    worker_id=self._worker_id,
                    incarnation=self._incarnation,
                    first_token=self._token(request, request.num_generated),
                    num_prompt_tokens=_num_prompt_tokens(request),
                    ttl_s=HANDOFF_TTL_S,
                    engine_state=_checksum(request),
                )
                await asyncio.sleep(self._settings.kv_transfer_ms / 1e3)
            finally:
                self._figures["kv_pinned_blocks"] -= 1

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """One token a step; the first as soon as the prompt is done or has arrived."""
        deadline = asyncio.get_running_loop().time() + request.deadline_s
        async with self._slot(request):
            if request.handoff is None:
                await self._run_prompt(request)
            elif request.handoff.engine_state == _checksum(request):
                await asyncio.sleep(self._settings.kv_transfer_ms / 1e3)
            else:
                raise HandoffFailed("The handoff belongs to another prompt.")
            yield self._chunk(request, request.num_generated)
            for position in range(request.num_generated + 1, request.sampling.max_tokens):
                await self._next_step.wait()
                if asyncio.get_running_loop().time() > deadline:
                    raise DeadlineExceeded(
                        "The request's deadline is over; ask for less, or allow more time."
                    )
                yield self._chunk(request, position)

    def stats(self) -> WorkerStats:
        """Live figures; a pinned handoff counts as one block."""
        return WorkerStats(**self._figures)

    async def failed(self) -> str:
        """Return if the clock broke, which would be a bug."""
        assert self._clock is not None
        await asyncio.wait([self._clock])
        return "the mocker's clock stopped"

    async def stop(self) -> None:
        """Stop the clock."""
        if self._clock is not None:
            self._clock.cancel()
            await asyncio.gather(self._clock, return_exceptions=True)

    @asynccontextmanager
    async def _slot(self, request: GenerateRequest) -> AsyncGenerator[None, None]:
        """A place in the batch; waits in the queue for one, not longer than the deadline."""
        num_tokens, limit = len(request.token_ids), self._settings.max_seq_len
        if num_tokens >= limit:
            raise InvalidRequest(f"The prompt has {num_tokens} tokens; this worker's context is {limit}.")
        if self._figures["num_waiting"] >= self._settings.max_queue_size:
            raise Overloaded("The worker's queue is full; try again later.", retry_after_s=1)
        self._figures["num_waiting"] += 1
        try:
            await asyncio.wait_for(self._slots.acquire(), request.deadline_s)
        except TimeoutError:
            raise DeadlineExceeded("The deadline was over before the request's turn came.") from None
        finally:
            self._figures["num_waiting"] -= 1
        self._figures["num_running"] += 1
        try:
            yield
        finally:
            self._figures["num_running"] -= 1
            self._slots.release()

    async def _run_prompt(self, request: GenerateRequest) -> None:
        self._figures["num_prompt_tokens"] += len(request.token_ids)
        await asyncio.sleep(len(request.token_ids) / self._settings.prefill_tokens_per_s)

    def _chunk(self, request: GenerateRequest, position: int) -> TokenChunk:
        self._figures["num_generated_tokens"] += 1
        token_ids = (self._token(request, position),)
        if position + 1 < request.sampling.max_tokens:
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
            await asyncio.sleep((self._settings.decode_step_ms + jitter_ms) / 1e3)
            step, self._next_step = self._next_step, asyncio.Event()
            step.set()


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
