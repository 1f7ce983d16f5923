"""What doctor found: one struct for each finding, how it is printed, and the exit status it stands for."""

import enum
from collections import Counter
from collections.abc import Sequence

import msgspec


class Severity(enum.StrEnum):
    """An error will not run; a warning runs badly or not always; a note is information."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem: the fact, what it will break, and the command (or edit) that repairs it."""

    severity: Severity
    code: str
    fact: str
    breaks: str
    repair: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of `--json`: what was looked at, one line each, and what was found, worst first."""

    seen: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def exit_status(self) -> int:
        """0 nothing worse than a note, 1 warnings, 2 errors."""
        found = {finding.severity for finding in self.findings}
        return 2 if Severity.ERROR in found else 1 if Severity.WARNING in found else 0


def error(code: str, fact: str, *, breaks: str, repair: str) -> Finding:
    """It will not run."""
    return Finding(severity=Severity.ERROR, code=code, fact=fact, breaks=breaks, repair=repair)


def warning(code: str, fact: str, *, breaks: str, repair: str) -> Finding:
    """It runs, but slowly, or not with every request."""
    return Finding(severity=Severity.WARNING, code=code, fact=fact, breaks=breaks, repair=repair)


def note(code: str, fact: str, *, breaks: str, repair: str) -> Finding:
    """Good to know."""
    return Finding(severity=Severity.NOTE, code=code, fact=fact, breaks=breaks, repair=repair)


def text(report: Report) -> str:
    """For a person: what was seen, then three aligned lines for each finding, then the count."""
    lines = [f"{'seen':<8} {line}" for line in report.seen]
    for finding in report.findings:
        lines += [
            f"{finding.severity:<8} {finding.fact}  [{finding.code}]",
            f"{'breaks':>8} {finding.breaks}",
            f"{'repair':>8} {finding.repair}",
        ]
    return "\n".join([*lines, _count(report.findings)]) + "\n"


def _count(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    return f"{'result':<8} " + (
        ", ".join(f"{counts[s]} {s}{'s' * (counts[s] > 1)}" for s in Severity if counts[s]) or "nothing found"
    )
