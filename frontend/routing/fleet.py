"""Tracks the live workers through discovery: models, prefill/decode pairs, health."""

import asyncio
import fnmatch
import logging
import math
import random
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from pathlib import Path

import msgspec
from msgspec.structs import replace

from baton.discovery import Discovery
from baton.errors import BatonError, EngineFailure, ModelNotFound, NoWorkers, WorkerLost
from baton.loop_delay import LoopDelay
from baton.messages import Role, StatsRequest, WorkerInfo, WorkerStats
from baton.number_check import Trusted, check_numbers
from baton.pairing import refused_pairs, why_not_paired, works
from baton.peer_tls import PeerDistrusted
from baton.transport import Transport
from frontend.metrics import Metrics
from frontend.routing.health import Events, Health, Instance
from frontend.routing.workers import NO_PROGRESS_S, Calls, CutPairs, Event, State, Workers
from frontend.text.tokenizer import ServedModel, Tokenizers

log = logging.getLogger(__name__)

Alias = tuple[str, str]
"""(name pattern such as `claude-*`, model)."""
STATS_TIMEOUT_S = 1.0
_LOOK_TIMEOUT_S = 0.2
_MOST_FOUND = 1024
_NO_PROGRESS = "its engine makes no progress"


class Fleet:
    """All workers of all models. `keep_current()` must run throughout. Only live ones get requests."""

    def __init__(
        self,
        discovery: Discovery,
        transport: Transport,
        *,
        model_path: Path | None = None,
        aliases: Sequence[Alias] = (),
        no_progress_s: float = NO_PROGRESS_S,
        current_date: str = "",
        delays: LoopDelay | None = None,
        trusted: Trusted | None = None,
    ) -> None:
        """`trusted` None: the workers' numbers are not checked."""
        self._trusted = trusted
        self._doubts: list[str] = []
        self._aliases = aliases
        self._current_date = current_date
        self._discovery = discovery
        self._transport = transport
        self.events = Events()
        self.table = Workers(self._probe, self.events, delays or LoopDelay())
        self._tokenizers = Tokenizers(model_path)
        self.cut = CutPairs(transport, self.table, self.events)
        self._no_progress_s = no_progress_s
        self._tokens_per_step: dict[str, float | None] = {}  # by worker id
        self._next_look_s = 0.0
        self.calls = Calls(self._is_stuck, self._give_up, no_progress_s)
        self.handoffs: Counter[tuple[str, str]] = Counter()
        """KV that moved since somebody last took this, by the ids of prefill and decode worker."""
        self._found = lru_cache(maxsize=_MOST_FOUND)(self._find)
        self._next_change = self.table.change  # until which that is so
        self.synced = asyncio.Event()
        """Set once the workers registered at the start are known."""

    @asynccontextmanager
    async def keep_current(self) -> AsyncGenerator[asyncio.Task[None], None]:
        """Follow discovery during the context; yields the task that does, which ends only if it fails."""
        sync = asyncio.create_task(self._sync())  # first, to see the first change
        follow = asyncio.create_task(self._follow())
        watch = asyncio.create_task(self.calls.watch())
        try:
            yield follow
        finally:
            own = [sync, follow, watch]
            tasks = [*own, *self._tokenizers.tasks(), *self.table.tasks(), *self.cut.trials.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def workers(self, model: str, role: Role, *, paired_with: WorkerInfo | None = None) -> list[WorkerInfo]:
        """Live workers of a role, ordered by id, that can exchange KV with `paired_with`. If it is None,
        prefill workers that can with some decode worker, or all decode workers."""
        if self._next_change is not self.table.change:
            self._found.cache_clear()
            self._next_change = self.table.change
        return self._found(model, role, paired_with)

    def _find(self, model: str, role: Role, paired_with: WorkerInfo | None) -> list[WorkerInfo]:
        live = [worker for worker in self.table.live() if worker.model == model]
        found = [worker for worker in live if worker.role is role]
        decodes = [w for w in live if w.role is Role.DECODE] if paired_with is None else [paired_with]
        if role is Role.PREFILL:
            return [w for w in found if any(self._can_pair(w, decode) for decode in decodes)]
        return [w for w in found if paired_with is None or self._can_pair(paired_with, w)]

    def num_token_ids(self, model: str) -> float:
        """How many token ids the model has; infinity if its tokenizer is not known yet."""
        loaded = self._tokenizers.loaded
        return loaded[model].num_token_ids if model in loaded else math.inf

    def models(self) -> list[str]:
        """Names of the available models, aliases without wildcards included."""
        decodes = {w.model for w in self.table.live() if w.role is Role.DECODE}
        served = decodes & self._tokenizers.loaded.keys()
        aliases = [name for name, _ in self._aliases if not set(name) & set("*?[")]
        return sorted(served.union(name for name in aliases if self._model_of(name) in served))

    def served(self, name: str) -> ServedModel:
        """The model of that name. Raises ModelNotFound, or NoWorkers if its decode workers or its tokenizer
        are missing; lost workers may answer again in a moment, and requests wait for them."""
        registered, model = self._registered(), self._model_of(name) or name
        mine = [worker for worker in registered if worker.model == model]
        if not registered:
            raise NoWorkers("No workers are available; start prefill and decode workers.", retry_after_s=1)
        if not mine:
            known = ", ".join(self.models()) or "none yet"
            raise ModelNotFound(
                f"The model {model!r} does not exist; available models: {known}. The frontend's "
                "--model-alias adds other names, such as 'claude-*=openai/gpt-oss-120b'.",
                param="model",
            )
        decodes = [worker for worker in mine if worker.role is Role.DECODE]
        if not [worker for worker in decodes if worker.is_ready]:
            what = "ready yet; retry later" if decodes else "available; start one"
            raise NoWorkers(f"No decode worker of {model!r} is {what}.", retry_after_s=1)
        tokenizer = self._tokenizers.loaded.get(model)
        if tokenizer is None:
            raise NoWorkers(f"The tokenizer of {model!r} is not loaded yet; retry later.", retry_after_s=1)
        context_length = min([worker.context_length for worker in mine])
        today = self._current_date or datetime.now(UTC).date().isoformat()
        return ServedModel(model, context_length, tokenizer, today)

    def health(self) -> Health:
        """The body of /health; healthy if at least one model can be served."""
        ready, live = set(self.models()), self.table.live()
        registered = self._registered()
        known = {w.worker_id for w in registered}
        served = {w.model for w in live if w.role is Role.DECODE}  # once their tokenizers are loaded
        lacks = (f"{w.model}: {'tokenizer' if w.model in served else 'decode'}" for w in registered)
        missing = [] if ready else [*lacks] or ["prefill", "decode"]
        away = {"NATS: requests wait for it": not self._transport.is_reachable}
        away["the registry: new workers get no requests"] = bool(self._discovery.problem)
        return Health(
            status="healthy" if ready else "unhealthy",
            endpoints=sorted({w.endpoint for w in live}),
            instances=[
                replace(
                    msgspec.convert(worker, Instance, from_attributes=True),
                    tokens_per_step=self._tokens_per_step.get(worker.worker_id),
                )
                for worker in live
            ],
            missing=sorted(set(missing)),
            warming=self._ids(State.WARMING) + self._ids(State.NEW),
            lost=self._ids(State.LOST),
            stuck=self._ids(State.STUCK),
            refused=self.table.reasons(State.REFUSED, State.DISTRUSTED),
            doubts=[*self._doubts, *_unequal_contexts(registered)],
            cold_pairs=[f"{w.worker_id} with {p}" for w in registered for p in w.cold_peers if p in known],
            refused_pairs=refused_pairs(registered),
            cut_pairs=self.cut.names(),
            unreachable=[what for what, is_away in away.items() if is_away],
        )

    async def look(self) -> Health:
        """`health`, with statistics of the last second, or older ones while a worker hangs."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + 1.0
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_TIMEOUT_S):
                    await self._answers()
        return self.health()

    async def stats(self) -> list[tuple[WorkerInfo, WorkerStats]]:
        """The statistics of every worker that answers within `STATS_TIMEOUT_S`."""
        return [(w, s) for w, s in await self.ask_all() if isinstance(s, WorkerStats)]

    async def ask_all(self) -> list[tuple[WorkerInfo, WorkerStats | BaseException]]:
        """The statistics of all workers but lost ones, or why there are none; who is unreachable is lost."""
        answers = await self._answers()
        for worker, answer in answers:
            if isinstance(answer, WorkerLost):
                self.table.note(worker, "lost", answer.message)
        return answers

    async def _answers(self) -> list[tuple[WorkerInfo, WorkerStats | BaseException]]:
        lost = self.table.of(State.LOST)
        asked = [worker for worker in self.table.all() if worker not in lost]
        found = await asyncio.gather(*map(self._ask, asked), return_exceptions=True)
        answers = list(zip(asked, found, strict=True))
        self._tokens_per_step = {
            worker.worker_id: stats.tokens_per_step
            for worker, stats in answers
            if isinstance(stats, WorkerStats)
        }
        return answers

    def note_workers(self, metrics: Metrics) -> None:
        """Set the metrics of the workers' states."""
        for state in State:
            roles = [worker.role for worker in self.table.of(state)]
            for role in Role:
                metrics.of("workers", role.value, state.value).value = roles.count(role)
        lost, self.events.lost = self.events.lost, Counter()
        for name in {*lost, *(worker.label for worker in self.table.all())}:
            metrics.of("workers_lost", metrics.bounded("workers_lost", name)).value += lost[name]
        metrics.of("cut_pairs").value = len(self.cut.names())
        metrics.of("pairs_cut").value = self.events.num_cut

    def _registered(self) -> list[WorkerInfo]:
        return [worker for worker in self.table.all() if not worker.refusal]

    def _model_of(self, name: str) -> str | None:
        return model_of(name, {worker.model for worker in self._registered()}, self._aliases)

    def _ids(self, state: State) -> list[str]:
        return [worker.worker_id for worker in self.table.of(state)]

    def _can_pair(self, prefill: WorkerInfo, decode: WorkerInfo) -> bool:
        return why_not_paired(prefill, decode) is None and not self.cut.has(prefill, decode)

    async def _probe(self, worker: WorkerInfo, state: State) -> tuple[Event, str]:
        """A stuck worker must answer a request, through a pair if there is one; others their statistics."""
        if state is State.STUCK:
            role = Role.PREFILL if worker.role is Role.DECODE else Role.DECODE
            partners = self.workers(worker.model, role, paired_with=worker)
            partner = random.choice(partners) if partners else None  # noqa: S311  not security-relevant
            is_working = await works(self._transport, worker, partner, limit_s=self._no_progress_s)
            return ("answered" if is_working else "silent"), ""
        try:
            await self._ask(worker)
        except PeerDistrusted as error:
            return "untrusted", error.message
        except (BatonError, TimeoutError):
            return "silent", ""
        return "answered", ""

    async def _is_stuck(self, worker: WorkerInfo) -> bool:
        """Whether a trial request fails, and the worker's counters do not move meanwhile."""
        try:
            before = await self._ask(worker)
            if await works(self._transport, worker, limit_s=self._no_progress_s):
                return False
            return _computed(before) == _computed(await self._ask(worker))
        except (BatonError, TimeoutError):
            return False  # it does not answer at all: its calls end without us

    def _give_up(self, worker: WorkerInfo) -> None:
        self.table.note(worker, "stalled", _NO_PROGRESS)
        self._transport.lose(worker.address, _NO_PROGRESS)

    async def _ask(self, worker: WorkerInfo) -> WorkerStats:
        """The worker's statistics. Raises TimeoutError after STATS_TIMEOUT_S, or a BatonError."""
        async with asyncio.timeout(STATS_TIMEOUT_S):
            async with aclosing(self._transport.call(worker.address, StatsRequest())) as replies:
                if isinstance(reply := await anext(replies, None), WorkerStats):
                    return reply
        raise EngineFailure(f"Worker {worker.worker_id} sent no statistics.")

    async def _follow(self) -> None:
        async with aclosing(self._discovery.watch()) as snapshots:
            async for workers in snapshots:
                self._tokenizers.load(worker for worker in workers if not worker.refusal)
                self.table.update(workers)
                if self._trusted is None:
                    continue
                ready = [w for w in self.table.all() if w.is_ready]  # others could end all that serve
                refused, doubts = check_numbers(ready, self._trusted)
                for worker in ready:
                    if worker.address in refused:
                        self.table.note(worker, "invalid", refused[worker.address])
                for doubt in set(doubts).difference(self._doubts):
                    log.error("numbers in doubt %s", doubt)
                self._doubts = doubts

    async def _sync(self) -> None:
        await self.table.change.wait()
        await self._tokenizers.tried()
        await self.table.probed(STATS_TIMEOUT_S)
        self.synced.set()


def _unequal_contexts(workers: Sequence[WorkerInfo]) -> Iterator[str]:
    """A sentence for each model whose workers differ."""
    for model in sorted({worker.model for worker in workers}):
        of = {worker.context_length: worker.label for worker in workers if worker.model == model}
        least, most = min(of), max(of)
        if least < most:
            both = f"{least} tokens of context on {of[least]}, {most} on {of[most]}"
            yield f"{model}: {both}; {least} are served"


_computed = attrgetter("num_prompt_tokens", "num_generated_tokens", "num_handoffs")


def model_of(name: str, models: Collection[str], aliases: Sequence[Alias]) -> str | None:
    """The model of this name or with this alias, of which the first that matches counts, or whose name has it
    after the last slash or before the first, if that is unambiguous; else None."""
    if name in models:
        return name
    aliased = [model for pattern, model in aliases if fnmatch.fnmatchcase(name, pattern)]
    if aliased:
        return aliased[0] if aliased[0] in models else None
    by_end = [model for model in models if model.endswith(f"/{name}")]
    by_start = [model for model in models if model.startswith(f"{name}/")]
    return next((named[0] for named in (by_end, by_start) if len(named) == 1), None)
