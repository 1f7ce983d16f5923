"""Seeded faults against a running stack: `python -m tests.chaos --minutes 10 --seed 7`, or `make chaos`."""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tests.chaos.kinds import INJECTORS, possible_on
from tests.chaos.load import asks, expected_of
from tests.chaos.run import episode, scene_on
from tests.chaos.scene import PLANES, Scene
from tests.chaos.schedule import faults, overlapping
from tests.chaos.scorecard import Episode, printed, write

_SIZES = {"mocker": (300, 900), "embedded": (60, 100)}
"""Tokens of the longest answer, words of the longest prompt: a CPU computes long ones for seconds."""


def main() -> int:
    """Exit status: 1 unless every fault had an effect and every promise was kept."""
    flags = _flags()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and hosts are removed
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    _say(f"seed {' '.join(map(str, flags.seed))}, logs in {folder}")
    scenes = [(seed, plane) for seed in flags.seed for plane in flags.planes]
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    episodes: list[Episode] = []
    for seed, plane in scenes:
        end_s = time.monotonic() + flags.minutes * 60 / len(scenes)
        (here := folder / f"{plane}-{seed}").mkdir()
        with scene_on(here, plane, flags.engine) as scene:
            for each in _episodes(scene, flags, seed, end_s):
                episodes.append(each)
                found = f"{len(each.findings)} findings" if each.findings else f"as promised ({each.proof})"
                _say(f"{each.name}: {found}")
                write(flags.out, episodes)
    _say(f"\n{printed(episodes)}\nwritten to {flags.out}")
    return not episodes or any(each.findings for each in episodes)


def _episodes(scene: Scene, flags: argparse.Namespace, seed: int, end_s: float) -> Iterator[Episode]:
    """Until `end_s`, or until the scene does not recover."""
    kinds = [kind for kind in possible_on(scene) if not flags.kinds or kind.name in flags.kinds]
    if left_out := set(flags.kinds or INJECTORS) - {kind.name for kind in kinds}:
        _say(f"{scene.plane}: not possible here: {', '.join(sorted(left_out))}")
    expected = expected_of(scene.stack.url, asks(seed, *_SIZES[scene.engine]))
    most = flags.faults and flags.skip + flags.faults
    source = overlapping if flags.overlap else faults
    for number, fault in islice(enumerate(source(seed, kinds)), flags.skip, most):
        if time.monotonic() > end_s:
            return
        yield (done := episode(scene, fault, expected, seed=seed, number=number, num_streams=flags.streams))
        if not done.has_recovered:
            return


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all seeds and planes together")
    parser.add_argument("--seed", type=int, nargs="+", default=[random.randrange(10_000)])
    parser.add_argument("--engine", choices=_SIZES, default="mocker")
    parser.add_argument("--planes", nargs="+", choices=PLANES, default=PLANES)
    parser.add_argument("--kinds", nargs="+", choices=INJECTORS, help="only these")
    parser.add_argument("--skip", type=int, default=0, help="faults at the beginning to leave out")
    parser.add_argument("--faults", type=int, help="the most for each seed and plane")
    parser.add_argument("--overlap", action="store_true", help="two faults at a time")
    parser.add_argument("--streams", type=int, default=8, help="concurrent streams")
    parser.add_argument("--out", type=Path, default=Path(".run/chaos.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
