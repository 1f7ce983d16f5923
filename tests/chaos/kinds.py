"""The kinds of faults: what each is called, does, may hit, and needs."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

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
_OTHERS = ("frontend", "nats", "etcd")
_TRAFFIC = ("network",)  # without workers there is none whose packets could be harmed

INJECTORS: dict[str, Callable[[Scene, Targets], Injector]] = {
    "kill": Kill,
    "kill_role": Kill,
    "kill_workers": Kill,
    "freeze": Freeze,
    "freeze_role": Freeze,
    "freeze_workers": Freeze,
    "freeze_frontend": Freeze,
    "kill_frontend": Kill,
    "slow": Slow,
    "hang_engine": HangEngine,
    "drain": Drain,
    "roll": Roll,
    "take_over": TakeOver,
    "lose_lease": LoseLease,
    "fill_disk": FillDisk,
    "jump_clock": JumpClock,
    "cut": Cut,
    "cut_pair": CutPair,
    "cut_workers": Cut,
    "cut_broker": Cut,
    "lose_packets": network_faults.lose,
    "repeat_packets": network_faults.repeat,
    "corrupt_packets": network_faults.corrupt,
    "kill_broker": Kill,
    "freeze_broker": Freeze,
    "kill_host": Kill,
}

_EVERYWHERE = (
    Kind(name="kill", targets=_EACH + _BOTH_ROLES),
    Kind(name="kill_role", targets=(PREFILLS, DECODES), hold_s=(0.0, 6.0), starts=True, blocks=True),
    Kind(
        name="kill_workers",
        targets=(WORKERS,),
        hold_s=(0.0, 6.0),
        starts=True,
        blocks=True,
        witnesses=_TRAFFIC,
    ),
    Kind(name="freeze", targets=_EACH + _BOTH_ROLES, hold_s=(0.5, 6.0)),
    Kind(name="freeze_role", targets=(PREFILLS, DECODES), hold_s=(0.5, 6.0), blocks=True),
    Kind(name="freeze_workers", targets=(WORKERS,), hold_s=(0.5, 6.0), blocks=True, witnesses=_TRAFFIC),
    Kind(name="freeze_frontend", targets=_FRONTEND, hold_s=(0.5, 20.0), blocks=True),
    Kind(name="slow", targets=_EACH, hold_s=(1.0, 5.0)),
    Kind(name="drain", targets=(*_EACH, PREFILLS, DECODES), starts=True),
    Kind(name="roll", targets=(WORKERS,), witnesses=_OTHERS),
    Kind(name="take_over", targets=_FRONTEND, witnesses=_OTHERS),
    Kind(name="lose_lease", targets=_EACH, hold_s=(0.0, 1.0), witnesses=("etcd",)),
    Kind(name="kill_frontend", targets=_FRONTEND, cuts=True, starts=True),
    Kind(name="fill_disk", targets=_FRONTEND, hold_s=(0.5, 3.0), witnesses=("nats", "etcd")),
)
_HANG_S = (20.0, 20.0)  # as long as it takes to find out, so that another fault is over before
_MOCKER = (
    Kind(name="hang_engine", targets=_EACH, hold_s=_HANG_S, gap_s=23.5, witnesses=(*_OTHERS, "network")),
)
_CLOCK = (
    Kind(name="jump_clock", targets=(("forwards",), ("backwards",)), hold_s=(0.5, 4.0), witnesses=_OTHERS),
)
_NETWORK = (
    Kind(name="cut", targets=_EACH, hold_s=(0.5, 6.0), is_of_network=True),
    Kind(name="cut_workers", targets=(WORKERS,), hold_s=(0.5, 6.0), blocks=True, is_of_network=True),
    Kind(
        name="cut_pair",
        targets=tuple((prefill, *DECODES) for prefill in PREFILLS),
        hold_s=(0.5, 6.0),
        is_of_network=True,
    ),
    Kind(name="lose_packets", targets=(("network",),), hold_s=(1.0, 4.0), gap_s=5.0, is_of_network=True),
    Kind(name="repeat_packets", targets=(("network",),), hold_s=(1.0, 4.0), is_of_network=True),
    Kind(name="corrupt_packets", targets=(("network",),), hold_s=(2.0, 5.0), gap_s=5.0, is_of_network=True),
)
_SOME_BROKERS = (("nats",), ("etcd",), ("nats", "etcd"))
_BROKERS = tuple(
    Kind(
        name=name,
        targets=_SOME_BROKERS,
        hold_s=(0.5, 20.0),
        gap_s=6.0,
        blocks=True,
        is_of_network=name == "cut_broker",
    )
    for name in ("kill_broker", "freeze_broker", "cut_broker")
)
_HOST = (
    Kind(
        name="kill_host",
        targets=((*BROKERS, *WORKERS),),
        hold_s=(0.0, 6.0),
        gap_s=6.0,
        starts=True,
        blocks=True,
        witnesses=_TRAFFIC,
    ),
)


def possible_on(scene: Scene) -> tuple[Kind, ...]:
    """What can be done here."""
    kinds = (
        *_EVERYWHERE,
        *(_MOCKER if scene.engine == "mocker" else ()),
        *(_CLOCK if "LD_PRELOAD" in scene.stack.environ else ()),
        *(_NETWORK if scene.network else ()),
        *(kind for kind in _BROKERS if scene.brokers and (scene.network or kind.name != "cut_broker")),
        *(_HOST if scene.brokers else ()),
    )
    start_s = START_S[scene.engine]
    return tuple(replace(kind, gap_s=kind.gap_s + kind.starts * start_s) for kind in kinds)
