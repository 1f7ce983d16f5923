"""Notices workers that only send heartbeats: they hold requests, and nothing comes of any of them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sized
from contextlib import contextmanager

from baton.messages import WorkerInfo

log = logging.getLogger(__name__)

NO_PROGRESS_S = 10.0
_CHECKS = 10
_TIMES_NORMAL = 4
_DECAY = 0.999  # per check: half forgotten after about ten minutes

IsStuck = Callable[[WorkerInfo, float], Awaitable[bool]]
"""Looks closer at a quiet worker, for so many seconds at most."""


class _Held:
    """One worker's running calls: the tokens of each, which grow, and how many there were at its start.

    Counts checks, not seconds: a frontend that stood still has not waited for anything.
    """

    def __init__(self, worker: WorkerInfo) -> None:
        self.worker = worker
        self.calls: dict[object, tuple[Sized, int]] = {}
        self.num_before = 0  # of calls that have ended
        self.num_quiet = 0
        self._num_seen = 0
        self._most_quiet = 0.0  # that the worker recovered from

    @property
    def limit(self) -> float:
        """The number of quiet checks after which something may be wrong."""
        return max(_CHECKS, _TIMES_NORMAL * self._most_quiet)

    def check(self) -> None:
        """Count a check as quiet if there are calls and none of them got on."""
        num = self.num_before + sum(len(tokens) - before for tokens, before in self.calls.values())
        self._most_quiet *= _DECAY
        if num != self._num_seen:
            self._most_quiet = max(self._most_quiet, self.num_quiet)
        self.num_quiet = self.num_quiet + 1 if self.calls and num == self._num_seen else 0
        self._num_seen = num


class Watchdog:
    """Watches the workers that hold requests of this frontend. `on_stuck` is called for one that gave no sign
    of progress for `no_progress_s`, or four times its longest pause if that is longer, and that `is_stuck`
    then found to be so. `check` must run throughout.
    """

    def __init__(
        self, is_stuck: IsStuck, on_stuck: Callable[[WorkerInfo], None], no_progress_s: float
    ) -> None:
        self._is_stuck = is_stuck
        self._on_stuck = on_stuck
        self._every_s = no_progress_s / _CHECKS
        self._held: dict[str, _Held] = {}
        self._judging: dict[str, asyncio.Task[None]] = {}

    @contextmanager
    def waiting(self, worker: WorkerInfo, tokens: Sized) -> Iterator[None]:
        """During the context a request waits for this worker; its progress is the growth of `tokens`. Errors
        are none: an engine that hangs has a full queue.
        """
        held = self._held.setdefault(worker.incarnation, _Held(worker))
        call, before = object(), len(tokens)
        held.calls[call] = tokens, before
        try:
            yield
        finally:
            held.num_before += len(tokens) - before
            del held.calls[call]

    async def check(self, is_registered: Callable[[WorkerInfo], bool]) -> None:
        """Check every worker, until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._every_s)
                for incarnation, held in tuple(self._held.items()):
                    held.check()
                    if held.num_quiet >= held.limit and incarnation not in self._judging:
                        self._judging[incarnation] = asyncio.create_task(self._judge(held))
                    elif not (held.calls or is_registered(held.worker)):
                        del self._held[incarnation]
        finally:
            for task in self._judging.values():
                task.cancel()

    async def _judge(self, held: _Held) -> None:
        limit_s = held.num_quiet * self._every_s
        is_stuck = await self._is_stuck(held.worker, limit_s)
        log.warning("quiet worker=%s for_s=%.3g stuck=%s", held.worker.worker_id, limit_s, is_stuck)
        if is_stuck and held.num_quiet >= held.limit:
            self._on_stuck(held.worker)
        held.num_quiet = 0
        del self._judging[held.worker.incarnation]
