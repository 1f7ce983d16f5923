"""What faults did to streams: counted, printed as a table, written as JSON."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from tests.chaos.load import Outcome
from tests.chaos.schedule import Fault


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """One fault and all streams that ran meanwhile. `proof` is empty if it had no effect; `problem` says why,
    or that the service did not recover. `orphans`: what still ran or was pinned afterwards.
    """

    plane: str
    engine: str
    seed: int
    number: int
    fault: Fault
    proof: str
    problem: str
    outcomes: list[Outcome]
    orphans: dict[str, float]

    @property
    def findings(self) -> list[str]:
        """All that was not as it should be."""
        found = [f"problem: {self.problem}"] if self.problem else []
        found += [f"orphaned: {name}={value:.0f}" for name, value in self.orphans.items()]
        for outcome in self.outcomes:
            if not outcome.is_exact:
                what = "different" if outcome.is_different else "hung" if outcome.is_hung else "lost"
                found.append(f"{what} after {len(outcome.text)} characters: {outcome.error}")
        return [
            f"{self.plane} {self.engine} seed={self.seed} #{self.number} {self.fault}: {one}" for one in found
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """A row of the table."""

    name: str
    faults: int
    effective: int
    streams: int
    lost: int
    different: int
    hung: int
    orphaned: int
    refused: int
    longest_gap_s: float

    @property
    def is_clean(self) -> bool:
        return self.effective == self.faults and not (
            self.lost or self.different or self.hung or self.orphaned
        )


def score(name: str, episodes: Iterable[Episode]) -> Score:
    """Add up. A stream is different, hung or lost, in this order; `orphaned` counts faults."""
    episodes = list(episodes)
    outcomes = [outcome for episode in episodes for outcome in episode.outcomes]
    sound = [outcome for outcome in outcomes if not outcome.is_different]
    return Score(
        name=name,
        faults=len(episodes),
        effective=sum(bool(episode.proof) and not episode.problem for episode in episodes),
        streams=len(outcomes),
        lost=sum(bool(outcome.error) and not outcome.is_hung for outcome in sound),
        different=len(outcomes) - len(sound),
        hung=sum(outcome.is_hung for outcome in sound),
        orphaned=sum(bool(episode.orphans) for episode in episodes),
        refused=sum(outcome.num_refused for outcome in outcomes),
        longest_gap_s=round(max((outcome.longest_gap_s for outcome in outcomes), default=0.0), 2),
    )


def scores(episodes: Sequence[Episode]) -> list[Score]:
    """One row for each plane and kind, and one for all."""
    name_of: Callable[[Episode], str] = lambda episode: f"{episode.plane} {episode.fault.kind}"  # noqa: E731
    names = sorted({name_of(episode) for episode in episodes})
    rows = [score(name, (each for each in episodes if name_of(each) == name)) for name in names]
    return [*rows, score("all", episodes)]


def printed(episodes: Sequence[Episode]) -> str:
    """The table, and every finding."""
    columns = [field.name for field in dataclasses.fields(Score)]
    rows = [columns, *([str(getattr(row, name)) for name in columns] for row in scores(episodes))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    table = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    findings = [finding for episode in episodes for finding in episode.findings]
    return "\n".join([*table, "", *findings, f"findings: {len(findings)}"])


def write(path: Path, episodes: Sequence[Episode]) -> None:
    """As JSON: the rows, and every episode with the streams that were not exact."""
    told = [
        dataclasses.replace(episode, outcomes=[each for each in episode.outcomes if not each.is_exact])
        for episode in episodes
    ]
    content = {"scores": scores(episodes), "episodes": told}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
