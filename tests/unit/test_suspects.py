"""Workers that get no requests until they answer, or work, again."""

import asyncio

from baton.messages import WorkerInfo
from frontend.routing.suspects import Suspects
from tests.clock import run_jumping
from tests.scripted_workers import worker

D1 = worker("d1")


class Scene:
    """Suspects of which all are registered and none answers or works until told."""

    def __init__(self) -> None:
        self.is_answering = self.is_working = False
        self.num_probes = self.num_changes = 0
        self.suspects = Suspects(self._answers, self._works, lambda _: True, self._on_change)

    def found(self) -> tuple[list[str], list[str], list[str]]:
        among = self.suspects.among([D1])
        return among.greeted, among.lost, among.stuck

    def _on_change(self) -> None:
        self.num_changes += 1

    async def _answers(self, _: WorkerInfo) -> bool:
        self.num_probes += 1
        return self.is_answering

    async def _works(self, _: WorkerInfo) -> bool:
        return self.is_working


def test_a_lost_worker_that_registers_again_is_probed_once_at_a_time() -> None:
    async def main() -> None:
        scene = Scene()
        scene.suspects.add(D1)
        scene.suspects.greet(D1)
        scene.suspects.add(D1)
        assert scene.found() == ([], ["d1"], [])
        await asyncio.sleep(0.1)
        assert scene.num_probes == 1
        (probe,) = scene.suspects.tasks()
        scene.is_answering = True
        await probe
        assert (scene.num_changes, scene.found()) == (1, ([], [], []))

    run_jumping(main())


def test_a_lost_worker_that_is_found_stuck_must_work_again() -> None:
    async def main() -> None:
        scene = Scene()
        scene.suspects.add(D1)
        scene.suspects.add(D1, is_stuck=True)
        assert scene.found() == ([], [], ["d1"])
        scene.is_answering = True
        await asyncio.sleep(5)
        assert scene.suspects.has(D1)
        scene.is_working = True
        await asyncio.sleep(5)
        assert not scene.suspects.has(D1)
        assert scene.found() == ([], [], [])

    run_jumping(main())
