"""What faults did to streams: counted, printed as a table, written as JSON."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.chaos.load import Outcome
from tests.chaos.schedule import Fault
from tests.waiting import scaled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """One fault and all streams that ran meanwhile. `problem`: why it had no effect, or that the service did
    not recover; else `proof` shows its effect. `orphans`: what still ran or was pinned afterwards."""

    plane: str
    engine: str
    seed: int
    number: int
    fault: Fault
    proof: str
    problem: str
    has_recovered: bool
    outcomes: list[Outcome]
    orphans: dict[str, float]

    @property
    def findings(self) -> list[str]:
        """All that the architecture promises otherwise."""
        found = [f"problem: {self.problem}"] if self.problem else []
        found += [f"orphaned: {name}={value:.0f}" for name, value in self.orphans.items()]
        if self.longest_gap_s > scaled(self.fault.gap_s):
            found.append(f"a gap of {self.longest_gap_s:.2f} s")
        found += [f"{each.end} after {len(each.text)} characters: {each.error}" for each in self.broken]
        return found

    @property
    def broken(self) -> list[Outcome]:
        """The streams that should have ended otherwise."""
        return [outcome for outcome in self.outcomes if outcome.end != "exact"]

    @property
    def longest_gap_s(self) -> float:
        """Of any stream."""
        return max((outcome.longest_gap_s for outcome in self.outcomes), default=0.0)

    @property
    def name(self) -> str:
        """With it, the same fault can be repeated."""
        return f"{self.plane} seed={self.seed} #{self.number} {self.fault}"

    @property
    def row(self) -> str:
        """The row of the table in which it counts."""
        return f"{self.plane} {self.fault.row}"


def score(name: str, episodes: Sequence[Episode]) -> dict[str, str | int | float]:
    """A row of the table; `orphaned` counts faults."""
    outcomes = [outcome for episode in episodes for outcome in episode.outcomes]
    ends = Counter(outcome.end for outcome in outcomes)
    return {
        "name": name,
        "faults": len(episodes),
        "effective": sum(not episode.problem for episode in episodes),
        "streams": len(outcomes),
        "exact": ends["exact"],
        "lost": ends["lost"],
        "different": ends["different"],
        "hung": ends["hung"],
        "orphaned": sum(bool(episode.orphans) for episode in episodes),
        "refused": sum(outcome.num_refused for outcome in outcomes),
        "resumed": sum(bool(outcome.num_resumed) for outcome in outcomes),
        "longest_gap_s": round(max((each.longest_gap_s for each in episodes), default=0.0), 2),
    }


def scores(episodes: Sequence[Episode]) -> list[dict[str, str | int | float]]:
    """One row for each plane and kind, and one for all."""
    names = sorted({episode.row for episode in episodes})
    rows = [score(name, [each for each in episodes if each.row == name]) for name in names]
    return [*rows, score("all", episodes)]


def printed(episodes: Sequence[Episode]) -> str:
    """The table, and every finding."""
    counted = scores(episodes)
    rows = [list(counted[0]), *([str(value) for value in row.values()] for row in counted)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = []
    for name, *figures in rows:
        cells = [each.rjust(width) for each, width in zip(figures, widths[1:], strict=True)]
        table.append("  ".join([name.ljust(widths[0]), *cells]))
    findings = [f"{episode.name}: {finding}" for episode in episodes for finding in episode.findings]
    return "\n".join([*table, "", *findings, f"findings: {len(findings)}"])


def write(path: Path, episodes: Sequence[Episode]) -> None:
    """As JSON: the rows, and the episodes with findings, with their broken streams."""
    found = [
        dataclasses.replace(episode, outcomes=episode.broken) for episode in episodes if episode.findings
    ]
    seeds = sorted({episode.seed for episode in episodes})
    content = {"seeds": seeds, "scores": scores(episodes), "findings": found}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
