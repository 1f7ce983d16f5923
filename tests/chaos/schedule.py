"""Which faults a seed gives, in which order, on what and for how long; pure."""

import dataclasses
import random
from collections import deque
from collections.abc import Iterator, Sequence

Targets = tuple[str, ...]
"""Names of processes, such as ("decode-1",); all of them are harmed at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault: the targets to choose from, and how long it lasts, in seconds. `cuts`: it ends
    clients' connections, and they come back for the rest. `gap_s`: how long streams may pause, on an idle
    machine; beyond the fault's own duration if it `blocks` them, and beyond a new process's start if it
    `starts` one that they wait for. `is_of_network`: it changes what the network does. `witnesses` must be
    well for its proof."""

    name: str
    targets: tuple[Targets, ...]
    hold_s: tuple[float, float] = (0.0, 0.0)
    cuts: bool = False
    gap_s: float = 3.5
    blocks: bool = False
    starts: bool = False
    is_of_network: bool = False
    witnesses: Targets = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: it begins `pause_s` after all streams run, and lasts `hold_s`. `other` begins its own
    `pause_s` later, if that is not after the end."""

    kind: str
    targets: Targets
    pause_s: float
    hold_s: float
    cuts: bool
    gap_s: float
    other: "Fault | None" = None

    def __str__(self) -> str:
        also = f" and {self.other}" if self.other else ""
        return f"{self.kind} {'+'.join(self.targets)} for {self.hold_s:.1f} s{also}"

    @property
    def row(self) -> str:
        """The kinds."""
        return " and ".join(sorted([self.kind, *([self.other.kind] if self.other else [])]))


def faults(seed: int, kinds: Sequence[Kind]) -> Iterator[Fault]:
    """Without end, in rounds: each has every kind once, in random order."""
    chance = random.Random(seed)
    while True:
        for kind in chance.sample(kinds, len(kinds)):
            targets = chance.choice(kind.targets)
            pause_s, hold_s = round(chance.uniform(0.0, 1.0), 2), round(chance.uniform(*kind.hold_s), 2)
            yield Fault(
                kind=kind.name,
                targets=targets,
                pause_s=pause_s,
                hold_s=hold_s,
                cuts=kind.cuts,
                gap_s=kind.gap_s + kind.blocks * hold_s,
            )


def overlapping(seed: int, kinds: Sequence[Kind]) -> Iterator[Fault]:
    """Two of them at a time, on different processes; never two of the network's."""
    of_network = {kind.name for kind in kinds if kind.is_of_network}
    involved = {kind.name: set(kind.witnesses) for kind in kinds}
    waiting: deque[Fault] = deque()
    for fault in faults(seed, kinds):
        apart = (
            other
            for other in waiting
            if not involved[fault.kind].union(fault.targets) & set(other.targets)
            and not involved[other.kind] & set(fault.targets)
            and not {fault.kind, other.kind} <= of_network
            and fault.kind != other.kind
        )
        first = next(apart, None)
        if first is None:
            waiting.append(fault)
            continue
        waiting.remove(first)
        yield dataclasses.replace(
            first, other=fault, cuts=first.cuts or fault.cuts, gap_s=first.gap_s + fault.gap_s
        )
