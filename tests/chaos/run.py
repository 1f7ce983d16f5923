"""One fault after another on a scene, each with its own streams from before its beginning until recovery."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.injector import Injector, NotEffectiveError
from tests.chaos.kinds import INJECTORS
from tests.chaos.load import Ask, Load
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
    load = Load(scene.stack.url, expected, num_streams, seed=seed * 1000 + number)
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
        return _injected(INJECTORS[fault.kind](scene, fault.targets), fault.hold_s), ""
    except (NotEffectiveError, AssertionError) as error:
        return "", f"{type(error).__name__}: {error}"


def _has_recovered(scene: Scene) -> bool:
    try:
        scene.wait_recovered()
    except AssertionError:
        return False
    return True


def _injected(injector: Injector, hold_s: float) -> str:
    try:
        injector.begin()
        time.sleep(hold_s)  # the schedule's duration
        return injector.proof()
    finally:
        injector.end()
