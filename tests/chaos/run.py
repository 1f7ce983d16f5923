"""One fault after another on a scene, each with its own streams from before its beginning until recovery."""

import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.injector import Injector, NotEffectiveError
from tests.chaos.kinds import INJECTORS
from tests.chaos.load import Ask, Load
from tests.chaos.process_faults import TakeOver
from tests.chaos.scene import WORKERS, Scene, brokers_of
from tests.chaos.schedule import Fault
from tests.chaos.scorecard import Episode
from tests.network import Network, why_not


@contextlib.contextmanager
def scene_on(folder: Path, plane: str, engine: str = "mocker") -> Iterator[Scene]:
    """A running scene, with namespaces and a wrong clock where they are possible."""
    with contextlib.ExitStack() as closing:
        network = None
        if not why_not():
            network = Network(*WORKERS, *brokers_of(plane))
            closing.callback(network.close)
        yield closing.enter_context(Scene(folder, plane, engine, network, wrong_clock(folder)))


def wrong_clock(folder: Path) -> Path | None:
    """A library that makes clocks wrong; None without a C compiler."""
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    try:
        subprocess.run(command, check=True)
    except OSError:
        return None
    (folder / "clock").write_bytes(bytes(8))
    return library


def episode(
    scene: Scene, fault: Fault, expected: dict[Ask, str], *, seed: int, number: int, num_streams: int
) -> Episode:
    """Inject one fault under load, and look at what it did."""
    load = Load(scene.stack.url, expected, num_streams, seed=seed * 1000 + number, resume=fault.cuts)
    try:
        proof, problem = _happened(scene, fault, load)
        has_recovered = _has_recovered(scene)
    finally:
        outcomes = load.stop()
    return Episode(
        plane=scene.plane,
        engine=scene.engine,
        seed=seed,
        number=number,
        fault=fault,
        proof=proof,
        problem=problem or ("" if has_recovered else "it did not recover"),
        has_recovered=has_recovered,
        outcomes=outcomes,
        orphans=scene.orphans() if has_recovered else {},
    )


def _happened(scene: Scene, fault: Fault, load: Load) -> tuple[str, str]:
    """The fault's proof, and its problem; one of them is empty."""
    load.wait_running()
    time.sleep(fault.pause_s)  # the schedule's moment
    try:
        return _injected(scene, fault), ""
    except (NotEffectiveError, AssertionError) as error:
        return "", f"{type(error).__name__}: {error}"


def _has_recovered(scene: Scene) -> bool:
    try:
        scene.wait_recovered()
    except AssertionError:
        return False
    return True


def _injected(scene: Scene, fault: Fault) -> str:
    """Carry a fault out, and the one that it overlaps with; returns their proofs."""
    began_s, proofs = time.monotonic(), []
    plan = [_Injected(INJECTORS[fault.kind](scene, fault.targets), 0.0, fault.hold_s)]
    if (other := fault.other) is not None:
        begin_s = min(other.pause_s, fault.hold_s)
        plan.append(_Injected(INJECTORS[other.kind](scene, other.targets), begin_s, begin_s + other.hold_s))
    with contextlib.ExitStack() as repairs:
        for each in plan:
            time.sleep(max(0.0, began_s + each.begin_s - time.monotonic()))  # the schedule's moment
            repairs.callback(each.repair)
            each.injector.begin()
        # Last a frontend that drains: its streams may wait for what the other fault took.
        for each in sorted(plan, key=lambda each: (isinstance(each.injector, TakeOver), each.end_s)):
            time.sleep(max(0.0, began_s + each.end_s - time.monotonic()))  # the schedule's duration
            proofs.append(each.injector.proof())
            each.repair()
    return "; ".join(proofs)


@dataclasses.dataclass
class _Injected:
    """When it begins and ends, after the first one began."""

    injector: Injector
    begin_s: float
    end_s: float
    is_over: bool = False

    def repair(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.injector.end()
