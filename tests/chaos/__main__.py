"""The long run: `python -m tests.chaos --minutes 10 --seed 7`; `make chaos` calls it."""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.kinds import INJECTORS, possible_on
from tests.chaos.load import asks, expected_of
from tests.chaos.run import episode, scene_on
from tests.chaos.scene import PLANES, Scene
from tests.chaos.schedule import faults
from tests.chaos.scorecard import Episode, printed, scores, write

_NUM_TOKENS = {"mocker": 300, "embedded": 60}


def main() -> int:
    """Exit status: 1 unless every fault had an effect and every stream was exact."""
    flags = _flags()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    sys.stdout.write(f"seed {flags.seed}, logs in {folder}\n")
    episodes: list[Episode] = []
    for plane in flags.planes:
        (here := folder / plane).mkdir()
        with scene_on(here, plane, flags.engine) as scene:
            for each in _episodes(scene, flags, time.monotonic() + flags.minutes * 60 / len(flags.planes)):
                episodes.append(each)
                bad = "; ".join(each.findings)
                sys.stdout.write(f"{plane} #{each.number} {each.fault}: {bad or f'exact ({each.proof})'}\n")
                sys.stdout.flush()
                write(flags.out, episodes)
    sys.stdout.write(f"\n{printed(episodes)}\nwritten to {flags.out}\n")
    return not scores(episodes)[-1].is_clean


def _episodes(scene: Scene, flags: argparse.Namespace, end_s: float) -> Iterator[Episode]:
    """Until `end_s`, or until the scene does not recover."""
    kinds = [kind for kind in possible_on(scene) if not flags.kinds or kind.name in flags.kinds]
    left_out = sorted(INJECTORS.keys() - {kind.name for kind in kinds})
    sys.stdout.write(f"{scene.plane}: not tried here: {', '.join(left_out)}\n")
    expected = expected_of(scene.stack.url, asks(flags.seed, _NUM_TOKENS[scene.engine]))
    for number, fault in enumerate(faults(flags.seed, kinds)):
        if time.monotonic() > end_s:
            return
        if number < flags.skip:
            continue
        yield (
            done := episode(scene, fault, expected, seed=flags.seed, number=number, num_streams=flags.streams)
        )
        if "AssertionError" in done.problem:
            return


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all planes together")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--engine", choices=_NUM_TOKENS, default="mocker")
    parser.add_argument("--planes", nargs="+", choices=PLANES, default=PLANES)
    parser.add_argument("--kinds", nargs="+", choices=INJECTORS, help="only these")
    parser.add_argument("--skip", type=int, default=0, help="faults at the beginning to leave out")
    parser.add_argument("--streams", type=int, default=8, help="concurrent streams")
    parser.add_argument("--out", type=Path, default=Path("chaos.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
