"""`python -m baton doctor --record FILE`: the numbers of a trusted build, which other builds must equal."""

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path

import msgspec

from baton.connect import Wires
from baton.messages import Scores, WorkerInfo
from baton.number_check import check_numbers
from baton.telemetry import print_error

_REGISTRY_S = 10.0


def record(path: Path, wires: Wires) -> int:
    """Write the scores of the registered workers, by model. Exit status: 0, 2 if there are none, if they
    differ, or if the file cannot be written.
    """
    try:
        wires.check()
        scores = _agreed(asyncio.run(_registered(wires)))
        path.write_bytes(msgspec.json.encode(scores))
    except (OSError, ValueError) as error:
        print_error(f"--record {path}: {str(error) or 'the registry does not answer'}")
        return 2
    sys.stdout.write(f"{path}: {', '.join(scores)}\n")
    return 0


def _agreed(workers: list[WorkerInfo]) -> dict[str, Scores]:
    """Raises ValueError if workers of one model differ, or if none is there or has scores."""
    (refused, doubts), labels = check_numbers(workers, {}), {w.address: w.label for w in workers}
    if problems := [*doubts, *(f"{labels[where]}: {why}" for where, why in refused.items())]:
        raise ValueError("; ".join(problems))
    if not workers:
        raise ValueError("no worker is registered, or the registry does not answer")
    scores = {worker.model: worker.scores for worker in workers if worker.scores is not None}
    if not scores:
        raise ValueError("no registered worker has numbers; start one of the trusted build")
    return scores


async def _registered(wires: Wires) -> list[WorkerInfo]:
    discovery = wires.discovery()
    try:
        async with asyncio.timeout(_REGISTRY_S), aclosing(discovery.watch()) as snapshots:
            return list(await anext(snapshots))
    finally:
        await discovery.close()
