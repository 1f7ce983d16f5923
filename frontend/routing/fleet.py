"""Tracks the live workers through discovery: models, prefill/decode pairs, health."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from baton.discovery import Discovery
from baton.errors import BatonError, ModelNotFound, NoWorkers
from baton.messages import Role, StatsRequest, WorkerInfo, WorkerStats
from baton.pairing import refused_pairs, why_not_paired
from baton.transport import Transport
from frontend.routing.health import Health, Instance
from frontend.routing.names import Alias, model_of, other_names
from frontend.text.served import ServedModel
from frontend.text.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)

STATS_TIMEOUT_S = 1.0
PROBE_EVERY_S = 0.5
_TOO_SHORT = (
    "--request-timeout-s %g is not above the KV timeout of %g s of worker=%s: when a prefill worker is lost, "
    "requests fail with deadline_exceeded instead of being retried"
)


class Fleet:
    """All workers of all models. `keep_current()` must run throughout. Requests go to workers that are ready
    and not lost.
    """

    def __init__(
        self,
        discovery: Discovery,
        transport: Transport,
        *,
        model_path: Path | None = None,
        request_timeout_s: float = math.inf,
        aliases: Sequence[Alias] = (),
    ) -> None:
        self._aliases = aliases
        self._discovery = discovery
        self._transport = transport
        self._model_path = model_path
        self._request_timeout_s = request_timeout_s
        self._workers: tuple[WorkerInfo, ...] = ()
        self._tokenizers: dict[str, ModelTokenizer] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._change = asyncio.Event()
        self.synced = asyncio.Event()
        """Set once the workers registered at the start are known."""

    @asynccontextmanager
    async def keep_current(self) -> AsyncGenerator[asyncio.Task[None], None]:
        """Follow discovery during the context; yields the task that does, which ends only if it fails."""
        follow = asyncio.create_task(self._follow())
        try:
            yield follow
        finally:
            tasks = [follow, *self._probes.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def workers(self, model: str, role: Role, *, paired_with: WorkerInfo | None = None) -> list[WorkerInfo]:
        """Live workers of a role, ordered by id.

        Prefill workers without a compatible decode worker are excluded; `paired_with` keeps only those of
        either role that can exchange KV with that worker.
        """
        found = [w for w in self._live() if w.model == model and w.role is role]
        if paired_with is not None:
            pairs = [(w, paired_with) if role is Role.PREFILL else (paired_with, w) for w in found]
            return [w for w, pair in zip(found, pairs, strict=True) if why_not_paired(*pair) is None]
        if role is Role.DECODE:
            return found
        decodes = [w for w in self._live() if w.model == model and w.role is Role.DECODE]
        return [w for w in found if any(why_not_paired(w, d) is None for d in decodes)]

    def suspect(self, worker: WorkerInfo) -> None:
        """Exclude a worker that a request has lost until it answers a probe: its lease may take long to
        expire, and a frozen process keeps it.
        """
        if worker.incarnation not in self._probes:
            self._probes[worker.incarnation] = asyncio.create_task(self._probe(worker))

    async def changed(self) -> None:
        """Return when other workers are live than now, or may be."""
        await self._change.wait()

    def models(self) -> list[str]:
        """Names of the available models, aliases included."""
        decodes = {w.model for w in self._live() if w.role is Role.DECODE}
        served = decodes & self._tokenizers.keys()
        return sorted({*served, *other_names(served, self._aliases)})

    def served(self, name: str) -> ServedModel:
        """The model of that name. Raises ModelNotFound, or NoWorkers if its decode workers are missing; lost
        ones may answer again in a moment, and requests wait for them.
        """
        model = model_of(name, {worker.model for worker in self._workers}, self._aliases) or name
        mine = [worker for worker in self._workers if worker.model == model]
        if not self._workers:
            raise NoWorkers("No workers are available; start prefill and decode workers.", retry_after_s=1)
        if not mine:
            known = ", ".join(self.models()) or "none yet"
            raise ModelNotFound(
                f"The model {model!r} does not exist; available models: {known}.", param="model"
            )
        decodes = [worker for worker in mine if worker.role is Role.DECODE]
        if not any(worker.is_ready for worker in decodes):
            what = "ready yet; retry later" if decodes else "available; start one"
            raise NoWorkers(f"No decode worker of {model!r} is {what}.", retry_after_s=1)
        if model not in self._tokenizers:
            raise NoWorkers(f"The tokenizer of {model!r} is still loading; retry later.", retry_after_s=1)
        return ServedModel(model, min(w.context_length for w in mine), self._tokenizers[model])

    def health(self) -> Health:
        """The body of /health; healthy if at least one model can be served."""
        ready, live = set(self.models()), self._live()
        known = {w.worker_id for w in self._workers}
        missing = [] if ready else [f"{w.model}: decode" for w in self._workers] or ["prefill", "decode"]
        return Health(
            status="healthy" if ready else "unhealthy",
            endpoints=sorted({w.endpoint for w in live}),
            instances=[_instance(w) for w in live],
            missing=sorted(set(missing)),
            warming=[w.worker_id for w in self._workers if not w.is_ready],
            lost=[w.worker_id for w in self._workers if w.incarnation in self._probes],
            cold_pairs=[f"{w.worker_id} with {p}" for w in self._workers for p in w.cold_peers if p in known],
            refused_pairs=refused_pairs(self._workers),
        )

    async def stats(self) -> list[tuple[WorkerInfo, WorkerStats]]:
        """The statistics of every worker that answers within `STATS_TIMEOUT_S`."""
        found = await asyncio.gather(*(self._ask(worker) for worker in self._workers))
        return [pair for pair in found if pair is not None]

    def _live(self) -> list[WorkerInfo]:
        return [w for w in self._workers if w.is_ready and w.incarnation not in self._probes]

    async def _probe(self, worker: WorkerInfo) -> None:
        """Probe a suspect until it answers or is no longer registered."""
        log.warning("lost worker=%s", worker.worker_id)
        while worker in self._workers and await self._ask(worker) is None:  # noqa: ASYNC110 it has to be polled
            await asyncio.sleep(PROBE_EVERY_S)
        del self._probes[worker.incarnation]
        self._note_change()
        log.info("probed worker=%s registered=%s", worker.worker_id, worker in self._workers)

    async def _ask(self, worker: WorkerInfo) -> tuple[WorkerInfo, WorkerStats] | None:
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                async with aclosing(self._transport.call(worker.address, StatsRequest())) as replies:
                    async for reply in replies:
                        if isinstance(reply, WorkerStats):
                            return worker, reply
        except (BatonError, TimeoutError) as error:
            log.debug("no stats worker=%s error=%s", worker.worker_id, error)
        return None

    async def _follow(self) -> None:
        async with aclosing(self._discovery.watch()) as snapshots:
            async for workers in snapshots:
                self._log_change(workers)
                self._workers = workers
                self._note_change()
                for worker in workers:
                    await self._load_tokenizer(worker)
                self.synced.set()

    def _note_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _load_tokenizer(self, worker: WorkerInfo) -> None:
        if worker.model in self._tokenizers:
            return
        folder = self._model_path or Path(worker.model_path)
        try:
            self._tokenizers[worker.model] = await asyncio.to_thread(ModelTokenizer.load, folder)
        except (OSError, ValueError) as error:
            log.warning("no tokenizer model=%s folder=%s error=%s", worker.model, folder, error)

    def _log_change(self, workers: tuple[WorkerInfo, ...]) -> None:
        before = {w.incarnation: w for w in self._workers if w.is_ready}
        after = {w.incarnation: w for w in workers if w.is_ready}
        for incarnation in after.keys() - before.keys():
            worker = after[incarnation]
            log.info(
                "joined worker=%s role=%s kv=%s", worker.worker_id, worker.role.value, worker.kv_transfer
            )
            if worker.kv_timeout_s is not None and worker.kv_timeout_s >= self._request_timeout_s:
                log.warning(_TOO_SHORT, self._request_timeout_s, worker.kv_timeout_s, worker.worker_id)
        for incarnation in before.keys() - after.keys():
            log.info("left worker=%s", before[incarnation].worker_id)


def _instance(worker: WorkerInfo) -> Instance:
    return Instance(
        worker_id=worker.worker_id,
        role=worker.role,
        endpoint=worker.endpoint,
        model=worker.model,
        engine=worker.engine,
        engine_version=worker.engine_version,
        kv_transfer=worker.kv_transfer,
    )
