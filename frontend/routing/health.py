"""What operators see of the fleet: the body of /health, and the newest events, each a line of the log."""

import logging
import time
from collections import Counter, deque
from typing import Literal

import msgspec

from baton.messages import Role
from baton.telemetry import Line

log = logging.getLogger(__name__)


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as /health shows it. `tokens_per_step`: of an answer, with the guesses that were right; None
    without guesses."""

    worker_id: str
    role: Role
    endpoint: str
    model: str
    engine: str
    engine_version: str
    kv_transfer: str
    tokens_per_step: float | None = None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /health. `missing`: what must be started, or become ready, before requests can be served.
    Workers: `warming` ones try their handoffs first, `lost` ones do not respond, `stuck` ones only send
    heartbeats, `refused` ones sent invalid tokens, compute other numbers or have a certificate of another
    authority; `doubts`: workers whose numbers or contexts differ, a model without a record. Pairs: the
    warm-up of `cold_pairs` failed, `refused_pairs` do not match, between `cut_pairs` no KV moved. Stuck
    workers and cut pairs are excluded until a trial succeeds. `unreachable`: NATS, the registry."""

    status: str
    endpoints: list[str]
    instances: list[Instance]
    missing: list[str]
    warming: list[str]
    lost: list[str]
    cold_pairs: list[str]
    refused_pairs: list[str]
    cut_pairs: list[str] = []
    stuck: list[str] = []
    refused: list[str] = []
    doubts: list[str] = []
    unreachable: list[str] = []


Kind = Literal["joined", "left", "lost", "recovered", "cut", "restored", "refused", "full"]

_NUM_KEPT = 200
_FULL_KEPT_S = 10.0
"""A pool that is full again so soon has been full all the time."""
_LEVELS = {"lost": logging.WARNING, "cut": logging.WARNING, "full": logging.WARNING, "refused": logging.ERROR}
_SUBJECTS = {"cut": "pair", "restored": "pair", "full": "pool"}


class FleetEvent(msgspec.Struct, kw_only=True):
    """`at_s` is Unix time. `what`: the worker's name, the pair or the pool. `lasted_s`: how long a worker was
    away, a pair cut or a pool full before."""

    at_s: float
    kind: Kind
    what: str
    detail: str = ""
    lasted_s: float | None = None


class Events:
    """The newest events of this frontend process."""

    def __init__(self) -> None:
        self._kept: deque[FleetEvent] = deque(maxlen=_NUM_KEPT)
        self.lost: Counter[str] = Counter()
        """Losses since somebody last took this, by worker."""
        self.num_cut = 0
        self._full: dict[str, FleetEvent] = {}  # by pool

    def add(self, kind: Kind, what: str, detail: str = "", lasted_s: float | None = None) -> FleetEvent:
        event = FleetEvent(at_s=time.time(), kind=kind, what=what, detail=detail, lasted_s=lasted_s)
        self._kept.append(event)
        self.lost.update([what] if kind == "lost" else ())
        self.num_cut += kind == "cut"
        subject = _SUBJECTS.get(kind, "worker")
        fields = {subject: what, "away_s": lasted_s and round(lasted_s, 3), "detail": detail}
        log.log(_LEVELS.get(kind, logging.INFO), Line(f"{subject} {kind}", **fields))
        return event

    def full(self, pool: str, detail: str) -> None:
        """A request waits for this pool, or is refused. One event as long as it goes on."""
        event, now_s = self._full.get(pool), time.time()
        if event is not None and 0.0 <= now_s - event.at_s <= _FULL_KEPT_S:
            event.lasted_s = (event.lasted_s or 0.0) + now_s - event.at_s
            event.at_s = now_s
        else:
            self._full[pool] = self.add("full", pool, detail)

    def newest(self, num: int) -> list[FleetEvent]:
        return sorted(self._kept, key=lambda event: -event.at_s)[:num]
