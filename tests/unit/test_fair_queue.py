"""Callers take turns in the queue."""

from collections.abc import Iterable

from frontend.routing.admission import FairQueue, Turn


def order(queue: FairQueue, turns: dict[str, Turn]) -> list[str]:
    """The names of all that wait, in turn."""
    names = {id(turn): name for name, turn in turns.items()}
    return [names[id(queue.pop())] for _ in range(len(queue))]


def filled(queue: FairQueue, names: Iterable[str], priority: int = 0) -> dict[str, Turn]:
    """One request for each name; its first letter is the caller."""
    return {name: queue.add(name[0], priority) for name in names}


async def test_a_caller_with_few_requests_does_not_wait_for_one_with_many() -> None:
    queue = FairQueue()
    turns = filled(queue, ["a1", "a2", "a3", "a4", "b1", "b2", "c1"])
    assert (len(queue), queue.num_callers, queue.num_of("a"), queue.num_of("z")) == (7, 3, 4, 0)
    assert order(queue, turns) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
    assert (len(queue), queue.num_callers) == (0, 0)


async def test_who_comes_back_waits_until_all_others_had_a_turn() -> None:
    queue = FairQueue()
    turns = filled(queue, ["a1", "a2", "b1"])
    assert queue.pop() is turns["a1"]
    turns |= filled(queue, ["a3"])
    assert order(queue, turns) == ["b1", "a2", "a3"]


async def test_priority_counts_among_the_same_callers_requests_only() -> None:
    queue = FairQueue()
    turns = filled(queue, ["a1", "a2", "b1"])
    turns |= filled(queue, ["a3"], priority=-5) | filled(queue, ["a4"], priority=5)
    assert order(queue, turns) == ["a3", "b1", "a1", "a2", "a4"]


async def test_a_request_that_gives_up_leaves_no_trace() -> None:
    queue = FairQueue()
    turns = filled(queue, ["a1", "a2", "b1", "b2"])
    queue.remove("b", turns.pop("b1"))
    queue.remove("a", turns.pop("a1"))
    assert order(queue, turns) == ["a2", "b2"]
    turns = filled(queue, ["a1"])
    queue.remove("a", turns["a1"])
    assert (len(queue), queue.num_callers) == (0, 0)
