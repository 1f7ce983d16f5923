"""Doctor's findings and their printed form."""

import enum
from collections import Counter

import msgspec


class Severity(enum.StrEnum):
    """Error: it will not run. Warning: it runs badly or not always. Note: information."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem: the fact, what it breaks, and the command or edit that repairs it."""

    severity: Severity
    code: str
    fact: str
    breaks: str
    repair: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `--json`: one line per thing examined, and the findings, worst first."""

    seen: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def exit_status(self) -> int:
        """0 for nothing worse than notes, 1 for warnings, 2 for errors."""
        found = {finding.severity for finding in self.findings}
        return 2 if Severity.ERROR in found else 1 if Severity.WARNING in found else 0


def text(report: Report) -> str:
    """The report for humans: what was examined, three aligned lines per finding, and the count."""
    lines = [f"{'seen':<8} {line}" for line in report.seen]
    for finding in report.findings:
        lines += [
            f"{finding.severity:<8} {finding.fact}  [{finding.code}]",
            f"{'breaks':>8} {finding.breaks}",
            f"{'repair':>8} {finding.repair}",
        ]
    counts = Counter(finding.severity for finding in report.findings)
    count = ", ".join(f"{counts[each]} {each}{'s' * (counts[each] > 1)}" for each in Severity if counts[each])
    return "\n".join([*lines, f"{'result':<8} {count or 'nothing found'}"]) + "\n"
