"""The scheduler: what runs in a step, what waits, and that everything ends with all blocks freed."""

from hypothesis import given
from hypothesis import strategies as st

from tests.embedded import scheduler, sequence
from tests.guided import ScriptedMatcher
from workers.engines.embedded.scheduler import Phase, Scheduler, Sequence, Step


def sizes(step: Step) -> list[tuple[int, int]]:
    """(start, tokens) of each piece of work."""
    return [(work.start, len(work.token_ids)) for work in step.work]


def finish_step(target: Scheduler, step: Step, token_id: int = 7) -> None:
    for work in step.work:
        target.advance(work, [token_id] if work.samples else [])


def test_an_answer_sits_out_while_it_is_not_known_what_its_form_allows() -> None:
    held, free = sequence(20), sequence(3)
    held.matcher = ScriptedMatcher()
    target, seen = scheduler(), []
    target.add(held)
    target.add(free)
    for held.matcher.is_ready in (False, False, True):
        step = target.plan()
        seen.append([(work.sequence is held, work.start, work.samples) for work in step.work])
        finish_step(target, step)
    assert seen == [[(True, 0, False)], [(False, 0, True)], [(False, 3, True), (True, 16, True)]]


def test_a_smaller_priority_waits_less_and_equals_keep_their_order() -> None:
    target = scheduler(max_batch_size=1)
    running, *rest = [sequence(n, max_tokens=1) for n in (1, 2, 3, 4, 5)]
    for waiting, priority in zip(rest, (0, 5, 0, -5), strict=True):
        waiting.priority = priority
    order = []
    target.add(running)
    first = target.plan()
    for waiting in rest:
        target.add(waiting)
    finish_step(target, first)
    while (step := target.plan()).work:
        order.append(len(step.work[0].token_ids))
        finish_step(target, step)
    assert order == [5, 2, 4, 3]


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    kind = draw(st.sampled_from(["plain", "pulls_kv", "hands_off"]))
    return sequence(
        draw(st.integers(1, 40)),
        draw(st.integers(1, 8)),
        pulls_kv=kind == "pulls_kv",
        hands_off=kind == "hands_off",
    )


@given(
    arrivals=st.lists(sequences(), max_size=12),
    num_blocks=st.integers(12, 30),
    max_batch_size=st.integers(1, 4),
    max_num_tokens=st.integers(4, 64),
    data=st.data(),
)
def test_everything_ends_and_every_block_comes_back(
    arrivals: list[Sequence], num_blocks: int, max_batch_size: int, max_num_tokens: int, data: st.DataObject
) -> None:
    target = scheduler(num_blocks=num_blocks, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)
    for each in arrivals:
        target.add(each)
    pulling: list[Sequence] = []
    for _ in range(12 * 60):
        if all(each.phase is Phase.DONE for each in arrivals):
            break
        step = target.plan()
        assert sum(len(work.token_ids) for work in step.work) <= max_num_tokens
        assert len(step.work) <= max_batch_size
        lengths = [len(work.token_ids) > 1 for work in step.work]
        assert lengths == sorted(lengths), "the pieces of one token come first"
        finish_step(target, step)
        for each in pulling:
            if each.phase is Phase.PULLING:
                target.pulled(each, 7)
        pulling = step.to_pull
        for each in arrivals:
            if each.phase is Phase.PINNED or data.draw(st.integers(0, 19)) == 0:
                target.remove(each)
    assert all(each.phase is Phase.DONE for each in arrivals)
    assert target.ledger.num_free == num_blocks
    assert (target.num_running, target.num_waiting) == (0, 0)


def test_full_blocks_are_found_while_their_sequence_runs_and_the_rest_by_one_that_goes_on() -> None:
    target, first = scheduler(reuses_blocks=True), sequence(9, 3)
    target.add(first)
    finish_step(target, target.plan())
    assert target.num_lacking(sequence(12)) == 4
    for _ in range(2):
        finish_step(target, target.plan())
    assert target.num_running == 0
    assert target.num_lacking(sequence(8)) >= 1  # the last token is computed anyhow

    again, other = sequence(0), sequence(0)
    again.token_ids, other.token_ids = [*first.token_ids, 5, 6], [*first.token_ids, 5, 6]
    assert target.num_lacking(again) == 3  # the last token of an answer has no KV
    target.add(again)
    target.add(other)
    assert sizes(target.plan()) == [(11, 3), (8, 6)], "only one may write on in the block"
    assert (again.num_cached, target.counts["num_cached_tokens"]) == (11, 19)
