"""A fabric step by step, with agents whose reads end when the test says so."""

import itertools
import time
from collections.abc import Callable

import pytest

from tests.kv_peer import needs_nixl
from tests.waiting import wait_for
from workers.kv.fabric import Fabric, Read
from workers.kv.memory import Memory, host_memory
from workers.kv.ucx import Reach

pytestmark = needs_nixl


class Steps:
    """Agents that note what is done with them, by name."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.done: set[object] = set()
        self.error: Exception | None = None
        self.refused: OSError | None = None
        self._names = map(chr, itertools.count(ord("A")))

    def agent(self, host: str, post: Callable[..., object]) -> "ScriptedAgent":
        if self.refused is not None:
            raise self.refused
        return ScriptedAgent(self, next(self._names))


class ScriptedAgent:
    def __init__(self, steps: Steps, name: str) -> None:
        self.name = name
        self._steps = steps

    def reach(self, payload: Memory) -> Reach:
        return reach(self.name)

    def read(self, reach: Reach, into: Memory) -> object:
        self._steps.noted.append(f"{self.name} reads")
        return self.name, object()

    def is_done(self, handle: tuple[str, object]) -> bool:
        if self._steps.error is not None:
            raise self._steps.error
        return "all" in self._steps.done or handle[0] in self._steps.done

    def release(self, handle: object) -> None:
        self._steps.noted.append(f"{self.name} releases")

    def progress(self) -> None:
        self._steps.noted.append(f"{self.name} answers")

    def close(self) -> None:
        self._steps.noted.append(f"{self.name} closes")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    made = Steps()
    monkeypatch.setattr("workers.kv.fabric.Agent", made.agent)
    return made


def new_fabric(max_peers: int = 2) -> Fabric:
    return Fabric("127.0.0.1", lambda call, *args: call(*args), max_peers=max_peers)


def reach(agent: str, epoch: int = 0) -> Reach:
    return Reach(agent, epoch, b"", 0, None)


def begun(fabric: Fabric, agent: str, epoch: int = 0) -> Read:
    read = Read(reach(agent, epoch), host_memory(bytearray(1)))
    fabric.begin(read)
    fabric.poll()
    return read


def test_reads_end_with_any_error_and_not_before_their_agent_is_closed(steps: Steps) -> None:
    fabric = new_fabric()
    both = begun(fabric, "source"), begun(fabric, "source")
    both[0].ended.add_done_callback(lambda _: steps.noted.append("ended"))
    steps.error = RuntimeError("the link is down")
    fabric.poll()
    assert steps.noted == ["A reads", "A reads", "A releases", "A releases", "A closes", "ended"]
    for read in both:
        with pytest.raises(OSError, match="the link is down"):
            read.ended.result(0)
    assert fabric.poll() is None


def test_a_read_that_is_given_up_ends_all_of_its_source_and_no_others(steps: Steps) -> None:
    fabric = new_fabric()
    hung, same, other = begun(fabric, "source"), begun(fabric, "source"), begun(fabric, "other")
    hung.give_up_at = 0
    fabric.poll()
    for read in (hung, same):
        assert isinstance(read.ended.exception(0), ConnectionAbortedError)
    assert steps.noted[-1] == "A closes"
    assert not other.ended.done()
    steps.done.add("B")
    fabric.poll()
    other.ended.result(0)


def test_giving_up_leaves_half_a_second() -> None:
    read = Read(reach("source"), host_memory(bytearray(1)))
    new_fabric().give_up(read)
    assert read.give_up_at <= time.monotonic() + 0.5


def test_a_read_that_waits_for_others_of_its_source_can_be_given_up(steps: Steps) -> None:
    fabric = new_fabric()
    first, second = begun(fabric, "source"), begun(fabric, "source", epoch=1)
    second.give_up_at = 0
    fabric.poll()
    assert isinstance(first.ended.exception(0), ConnectionAbortedError)
    assert isinstance(second.ended.exception(0), ConnectionAbortedError)
    assert fabric.poll() is None


def test_a_source_that_is_read_makes_no_room_for_another(steps: Steps) -> None:
    fabric = new_fabric(max_peers=1)
    running, another = begun(fabric, "source"), begun(fabric, "another")
    assert not running.ended.done()
    assert not another.ended.done()
    steps.done.add("all")
    fabric.poll()
    begun(fabric, "third")
    assert [note for note in steps.noted if note.endswith("closes")] == ["A closes"]


def test_a_read_for_which_no_agent_starts_fails_alone(steps: Steps) -> None:
    fabric = new_fabric()
    running = begun(fabric, "source")
    steps.refused = OSError("no device")
    with pytest.raises(OSError, match="no device"):
        begun(fabric, "another").ended.result(0)
    assert not running.ended.done()


def test_polling_rests_between_the_steps_of_a_long_read(steps: Steps) -> None:
    fabric = new_fabric()
    begun(fabric, "source")
    wait_for(fabric.poll)  # more than 0 s
