"""Registered workers that get no requests: until they answer a probe, or for good."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from baton.messages import WorkerInfo

log = logging.getLogger(__name__)

PROBE_EVERY_S = 0.5

Answers = Callable[[WorkerInfo], Awaitable[bool]]
"""Whether the worker answers a probe, soon."""


class Excluded(msgspec.Struct, kw_only=True):
    """Worker ids by why they get no requests; of refused ones, the whole reason."""

    greeted: list[str] = []
    lost: list[str] = []
    stuck: list[str] = []
    refused: list[str] = []


class Suspects:
    """Workers by address, which is new with each start. A new one is `greeted`: it must answer once. A `lost`
    one must answer again; a `stuck` one `works` again, too. A `refused` one sent what no genuine worker does.
    A `distrusted` one may be trusted later, as certificates are renewed.
    """

    def __init__(
        self,
        answers: Answers,
        works: Answers,
        is_registered: Callable[[WorkerInfo], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._answers = answers
        self._works = works
        self._is_registered = is_registered
        self._on_change = on_change
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._greeted: set[str] = set()
        self._stuck: set[str] = set()
        self._refused: dict[str, str] = {}
        self._distrusted: dict[str, str] = {}

    def has(self, worker: WorkerInfo) -> bool:
        """Whether it gets no requests."""
        return worker.address in self._probes or worker.address in self._refused

    def greet(self, worker: WorkerInfo) -> None:
        """Exclude a worker that has just registered until it answers: its address may be anything."""
        if worker.address not in self._probes:
            self._greeted.add(worker.address)
            self._start(worker)

    def add(self, worker: WorkerInfo, *, is_stuck: bool = False) -> None:
        """Exclude a worker that a request has lost: its lease may take long to expire, and a frozen process
        keeps it.
        """
        if is_stuck:
            self._stuck.add(worker.address)
        if worker.address not in self._probes:
            self._note_lost(worker)
            self._start(worker)

    def refuse(self, worker: WorkerInfo, reason: str) -> None:
        """Exclude a worker for as long as it is registered; /health has the reason."""
        if worker.address not in self._refused:
            log.error("refused worker=%s: %s", worker.worker_id, reason)
            self._refused[worker.address] = f"{worker.worker_id}: {reason}"

    def distrust(self, worker: WorkerInfo, reason: str | None) -> None:
        """Say in /health why a worker did not answer: it and this process do not trust each other. Without a
        reason: this was not why.
        """
        if reason is None:
            self._distrusted.pop(worker.address, None)
        elif worker.address in self._probes and self._distrusted.get(worker.address) != reason:
            log.error("distrusted worker=%s: %s", worker.worker_id, reason)
            self._distrusted[worker.address] = reason

    def forget(self, registered: Iterable[WorkerInfo]) -> None:
        """Drop what is known of refused workers that are not registered any more."""
        live = {worker.address for worker in registered}
        self._refused = {key: reason for key, reason in self._refused.items() if key in live}

    async def greetings(self, limit_s: float) -> None:
        """Wait until those that were greeted have answered, at most so long."""
        probes = [self._probes[address] for address in self._greeted]
        if probes:
            await asyncio.wait(probes, timeout=limit_s)

    def among(self, workers: Iterable[WorkerInfo]) -> "Excluded":
        """Those of the workers that get no requests."""
        found = Excluded(refused=list(self._refused.values()))
        for worker in workers:
            if worker.address in self._distrusted:
                found.refused.append(f"{worker.worker_id}: {self._distrusted[worker.address]}")
            elif worker.address in self._greeted:
                found.greeted.append(worker.worker_id)
            elif worker.address in self._stuck:
                found.stuck.append(worker.worker_id)
            elif worker.address in self._probes:
                found.lost.append(worker.worker_id)
        return found

    def tasks(self) -> list[asyncio.Task[None]]:
        """The running probes."""
        return list(self._probes.values())

    def _start(self, worker: WorkerInfo) -> None:
        self._probes[worker.address] = asyncio.create_task(self._probe(worker))

    def _note_lost(self, worker: WorkerInfo) -> None:
        log.warning("lost worker=%s stuck=%s", worker.worker_id, worker.address in self._stuck)

    async def _probe(self, worker: WorkerInfo) -> None:
        """Probe until it answers or is no longer registered."""
        while self._is_registered(worker) and not await self._is_back(worker):
            if worker.address in self._greeted:
                self._greeted.discard(worker.address)
                self._note_lost(worker)
            await asyncio.sleep(PROBE_EVERY_S)
        was_lost = worker.address not in self._greeted
        for group in (self._greeted, self._stuck):
            group.discard(worker.address)
        self._distrusted.pop(worker.address, None)
        del self._probes[worker.address]
        self._on_change()
        if was_lost:
            log.info("probed worker=%s registered=%s", worker.worker_id, self._is_registered(worker))

    async def _is_back(self, worker: WorkerInfo) -> bool:
        is_stuck = worker.address in self._stuck
        return await (self._works(worker) if is_stuck else self._answers(worker))
