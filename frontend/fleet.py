"""The live workers, kept current from discovery: who serves what, who can be paired, what is missing."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec

from baton.discovery import Discovery
from baton.errors import BatonError, ModelNotFound, NoWorkers
from baton.messages import Role, StatsRequest, WorkerInfo, WorkerStats
from baton.transport import Transport
from frontend.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)

SUSPECT_S = 5.0
STATS_TIMEOUT_S = 1.0


class ServedModel(msgspec.Struct, frozen=True):
    """A model that can be asked for: its shortest context among the workers (tokens), its tokenizer."""

    name: str
    context_length: int
    tokenizer: ModelTokenizer


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as /health shows it."""

    worker_id: str
    role: str
    endpoint: str
    model: str
    engine: str
    engine_version: str
    kv_transfer: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /health. `missing` says what must be started before a request can be served."""

    status: str
    endpoints: list[str]
    instances: list[Instance]
    missing: list[str]
    refused_pairs: list[str]


class Fleet:
    """All workers of all models. `keep_current()` runs while the frontend does."""

    def __init__(self, discovery: Discovery, transport: Transport, *, model_path: Path | None = None) -> None:
        self._discovery = discovery
        self._transport = transport
        self._model_path = model_path
        self._workers: tuple[WorkerInfo, ...] = ()
        self._tokenizers: dict[str, ModelTokenizer] = {}
        self._suspects: dict[str, float] = {}
        self._refused: list[str] = []

    @asynccontextmanager
    async def keep_current(self) -> AsyncGenerator[None, None]:
        """Follow discovery while the context is open."""
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def workers(self, model: str, role: Role, *, paired_with: WorkerInfo | None = None) -> list[WorkerInfo]:
        """Live workers of a role, those lost lately left out as long as there are others.

        A prefill worker that no decode worker can take KV from is not listed; with `paired_with`, only decode
        workers that can take KV from that prefill worker are.
        """
        found = [w for w in self._workers if w.model == model and w.role is role]
        if paired_with is not None:
            found = [w for w in found if why_not_paired(paired_with, w) is None]
        elif role is Role.PREFILL:
            decodes = [w for w in self._workers if w.model == model and w.role is Role.DECODE]
            found = [w for w in found if any(why_not_paired(w, d) is None for d in decodes)]
        now = asyncio.get_running_loop().time()
        return [w for w in found if self._suspects.get(w.incarnation, 0.0) <= now] or found

    def suspect(self, worker: WorkerInfo) -> None:
        """Prefer others for a while: a request has just lost this worker."""
        self._suspects[worker.incarnation] = asyncio.get_running_loop().time() + SUSPECT_S

    def models(self) -> list[str]:
        """Names that can be asked for now."""
        return sorted(
            {w.model for w in self._workers if w.role is Role.DECODE and w.model in self._tokenizers}
        )

    def served(self, model: str) -> ServedModel:
        """Raises ModelNotFound for a name nobody has, NoWorkers if its decode workers are missing."""
        mine = [worker for worker in self._workers if worker.model == model]
        if not self._workers:
            raise NoWorkers(
                "No worker is live: prefill and decode are missing. Start a decode worker.", retry_after_s=1
            )
        if not mine:
            known = ", ".join(self.models()) or "none yet"
            raise ModelNotFound(f"The model {model!r} is not served here. Served: {known}.", param="model")
        if not any(worker.role is Role.DECODE for worker in mine):
            raise NoWorkers(f"No decode worker is live for {model!r}; start one.", retry_after_s=1)
        if model not in self._tokenizers:
            raise NoWorkers(f"The tokenizer of {model!r} is still being loaded; try again.", retry_after_s=1)
        return ServedModel(model, min(w.context_length for w in mine), self._tokenizers[model])

    def health(self) -> Health:
        """Healthy as soon as one model can be served; what else is missing is named all the same."""
        ready = set(self.models())
        missing = [] if ready else [f"{w.model}: decode" for w in self._workers] or ["prefill", "decode"]
        return Health(
            status="healthy" if ready else "unhealthy",
            endpoints=sorted({w.endpoint for w in self._workers}),
            instances=[_instance(w) for w in self._workers],
            missing=sorted(set(missing)),
            refused_pairs=self._refused,
        )

    async def stats(self) -> list[tuple[WorkerInfo, WorkerStats]]:
        """The figures of every worker that answers within a second."""
        found = await asyncio.gather(*(self._ask(worker) for worker in self._workers))
        return [pair for pair in found if pair is not None]

    async def _ask(self, worker: WorkerInfo) -> tuple[WorkerInfo, WorkerStats] | None:
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                async with aclosing(self._transport.call(worker.address, StatsRequest())) as replies:
                    async for reply in replies:
                        if isinstance(reply, WorkerStats):
                            return worker, reply
        except (BatonError, TimeoutError) as error:
            log.info("no stats worker=%s error=%s", worker.worker_id, error)
        return None

    async def _follow(self) -> None:
        async with aclosing(self._discovery.watch()) as snapshots:
            async for workers in snapshots:
                self._log_change(workers)
                self._workers = workers
                self._refused = list(_refused_pairs(workers))
                for worker in workers:
                    await self._load_tokenizer(worker)

    async def _load_tokenizer(self, worker: WorkerInfo) -> None:
        if worker.model in self._tokenizers:
            return
        folder = self._model_path or Path(worker.model_path)
        try:
            self._tokenizers[worker.model] = await asyncio.to_thread(ModelTokenizer.load, folder)
        except (OSError, ValueError) as error:
            log.warning("no tokenizer model=%s folder=%s error=%s", worker.model, folder, error)

    def _log_change(self, workers: tuple[WorkerInfo, ...]) -> None:
        before = {w.incarnation: w for w in self._workers}
        after = {w.incarnation: w for w in workers}
        for incarnation in after.keys() - before.keys():
            worker = after[incarnation]
            log.info(
                "joined worker=%s role=%s kv=%s", worker.worker_id, worker.role.value, worker.kv_transfer
            )
        for incarnation in before.keys() - after.keys():
            log.info("left worker=%s", before[incarnation].worker_id)
            self._suspects.pop(incarnation, None)


def why_not_paired(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """Why the KV of one cannot go to the other, naming both values; None if it can."""
    for name, left, right in (
        ("engine", prefill.engine, decode.engine),
        ("engine version", prefill.engine_version, decode.engine_version),
        ("kv layout", prefill.kv_layout, decode.kv_layout),
        ("kv transfer", prefill.kv_transfer.split(" ")[0], decode.kv_transfer.split(" ")[0]),
    ):
        if left != right:
            return f"{prefill.worker_id} -> {decode.worker_id}: {name} {left} is not {right}"
    return None


def _refused_pairs(workers: tuple[WorkerInfo, ...]) -> Iterable[str]:
    for prefill in workers:
        for decode in workers:
            if prefill.role is Role.PREFILL and decode.role is Role.DECODE and prefill.model == decode.model:
                reason = why_not_paired(prefill, decode)
                if reason:
                    yield reason


def _instance(worker: WorkerInfo) -> Instance:
    return Instance(
        worker_id=worker.worker_id,
        role=worker.role.value,
        endpoint=worker.endpoint,
        model=worker.model,
        engine=worker.engine,
        engine_version=worker.engine_version,
        kv_transfer=worker.kv_transfer,
    )
