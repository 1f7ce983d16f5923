"""The kinds of faults: what each is called, does, may hit, and needs."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from tests.chaos import network_faults
from tests.chaos.host_faults import FillDisk, JumpClock, LoseLease
from tests.chaos.injector import Injector
from tests.chaos.network_faults import Cut, CutPair
from tests.chaos.process_faults import Drain, Freeze, HangEngine, Kill, Roll, Slow, TakeOver
from tests.chaos.scene import BROKERS, DECODES, PREFILLS, START_S, WORKERS, Scene
from tests.chaos.schedule import Kind, Targets

_EACH = tuple((name,) for name in WORKERS)
_BOTH_ROLES = tuple(product(PREFILLS, DECODES))
_FRONTEND = (("frontend",),)
_NETWORK = (("network",),)
_SOME_BROKERS = (("nats",), ("etcd",), ("nats", "etcd"))
_PAIRS = tuple((prefill, *DECODES) for prefill in PREFILLS)
_OTHERS = ("frontend", "nats", "etcd")
_TRAFFIC = ("network",)  # without workers there is none whose packets could be harmed
_HANG_S = (20.0, 20.0)  # as long as it takes to find out, so that another fault is over before


class _Row(NamedTuple):
    inject: Callable[[Scene, Targets], Injector]
    kind: Kind
    needs: frozenset[str] = frozenset()


def _row(
    inject: Callable[[Scene, Targets], Injector],
    name: str,
    targets: tuple[Targets, ...],
    *hold_s: float,
    needs: str = "",
    **fields: float | bool | Targets,
) -> _Row:
    """`needs`: words of `_offered`, separated by spaces."""
    held: dict[str, object] = {"hold_s": hold_s} if hold_s else {}
    return _Row(inject, Kind(name=name, targets=targets, **held | fields), frozenset(needs.split()))  # type: ignore[arg-type]  # fields by name


_ROWS = (
    _row(Kill, "kill", _EACH + _BOTH_ROLES),
    _row(Kill, "kill_role", (PREFILLS, DECODES), 0.0, 6.0, starts=True, blocks=True),
    _row(Kill, "kill_workers", (WORKERS,), 0.0, 6.0, starts=True, blocks=True, witnesses=_TRAFFIC),
    _row(Freeze, "freeze", _EACH + _BOTH_ROLES, 0.5, 6.0),
    _row(Freeze, "freeze_role", (PREFILLS, DECODES), 0.5, 6.0, blocks=True),
    _row(Freeze, "freeze_workers", (WORKERS,), 0.5, 6.0, blocks=True, witnesses=_TRAFFIC),
    _row(Freeze, "freeze_frontend", _FRONTEND, 0.5, 20.0, blocks=True),
    _row(Slow, "slow", _EACH, 1.0, 5.0),
    _row(Drain, "drain", (*_EACH, PREFILLS, DECODES), starts=True),
    _row(Roll, "roll", (WORKERS,), witnesses=_OTHERS),
    _row(TakeOver, "take_over", _FRONTEND, witnesses=_OTHERS),
    _row(LoseLease, "lose_lease", _EACH, 0.0, 1.0, witnesses=("etcd",)),
    _row(Kill, "kill_frontend", _FRONTEND, cuts=True, starts=True),
    _row(FillDisk, "fill_disk", _FRONTEND, 0.5, 3.0, witnesses=("nats", "etcd")),
    _row(HangEngine, "hang_engine", _EACH, *_HANG_S, needs="mocker", gap_s=23.5,
         witnesses=(*_OTHERS, "network")),
    _row(JumpClock, "jump_clock", (("forwards",), ("backwards",)), 0.5, 4.0, needs="clock",
         witnesses=_OTHERS),
    _row(Cut, "cut", _EACH, 0.5, 6.0, needs="network"),
    _row(Cut, "cut_workers", (WORKERS,), 0.5, 6.0, needs="network", blocks=True),
    _row(CutPair, "cut_pair", _PAIRS, 0.5, 6.0, needs="network"),
    _row(network_faults.lose, "lose_packets", _NETWORK, 1.0, 4.0, needs="network", gap_s=5.0),
    _row(network_faults.repeat, "repeat_packets", _NETWORK, 1.0, 4.0, needs="network"),
    _row(network_faults.corrupt, "corrupt_packets", _NETWORK, 2.0, 5.0, needs="network", gap_s=5.0),
    _row(Kill, "kill_broker", _SOME_BROKERS, 0.5, 20.0, needs="brokers", gap_s=6.0, blocks=True),
    _row(Freeze, "freeze_broker", _SOME_BROKERS, 0.5, 20.0, needs="brokers", gap_s=6.0, blocks=True),
    _row(Cut, "cut_broker", _SOME_BROKERS, 0.5, 20.0, needs="brokers network", gap_s=6.0, blocks=True),
    _row(Kill, "kill_host", ((*BROKERS, *WORKERS),), 0.0, 6.0, needs="brokers", gap_s=6.0, starts=True,
         blocks=True, witnesses=_TRAFFIC),
)  # fmt: skip

INJECTORS = {row.kind.name: row.inject for row in _ROWS}


def _offered(scene: Scene) -> set[str]:
    offers = {
        "mocker": scene.engine == "mocker",
        "clock": "LD_PRELOAD" in scene.stack.environ,
        "network": scene.network is not None,
        "brokers": bool(scene.brokers),
    }
    return {name for name, is_there in offers.items() if is_there}


def possible_on(scene: Scene) -> tuple[Kind, ...]:
    """What can be done here."""
    start_s, offered = START_S[scene.engine], _offered(scene)
    return tuple(
        replace(
            row.kind, gap_s=row.kind.gap_s + row.kind.starts * start_s, is_of_network="network" in row.needs
        )
        for row in _ROWS
        if row.needs <= offered
    )
