"""The number check: how far two workers' probabilities are apart, who is refused, and who is in doubt."""

import math
from pathlib import Path

import msgspec
import pytest

from baton.messages import Role, Scores, WorkerInfo
from baton.number_check import DIGEST, TOLERANCE, check_numbers, difference, read_trusted
from tests.unit.test_fleet import decodes, fleet_of, worker
from tests.waiting import until


def scores(*shares: float, prompts: str = DIGEST) -> Scores:
    """One prompt, with these probabilities of tokens 0, 1, ..."""
    return Scores(prompts, (tuple((token, math.log(share)) for token, share in enumerate(shares)),))


RIGHT, TWIN, WRONG, OTHER = scores(0.8, 0.1), scores(0.78, 0.12), scores(0.5, 0.4), scores(0.1, 0.8)


def d(number: int, of: Scores | None, **changes: object) -> WorkerInfo:
    return worker(f"d{number}", scores=of, **changes)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (RIGHT, RIGHT, 0.0),
        (RIGHT, TWIN, 0.02),
        (RIGHT, WRONG, 0.3),
        (scores(0.6, 0.4), scores(0.6), 0.0),  # the other token may have as much there
        (scores(0.6, 0.4), scores(0.2), 0.3),
        (scores(1.0), Scores(DIGEST, (((7, 0.0),),)), 1.0),
        (Scores(DIGEST, (((7, -9999.0), (8, -9999.0)),)), RIGHT, 0.45),
        (Scores(DIGEST, (((7, 1e300),),)), RIGHT, 0.9),
        (Scores(DIGEST, ((),)), RIGHT, 0.0),
    ],
)
def test_the_difference_is_the_share_of_probability_on_other_tokens(
    left: Scores, right: Scores, expected: float
) -> None:
    assert difference(left, right) == pytest.approx(expected)
    assert difference(right, left) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("all_scores", "refused", "num_doubts"),
    [
        ([RIGHT], [], 0),
        ([RIGHT, TWIN], [], 0),
        ([RIGHT, TWIN, scores(0.74, 0.16)], [], 0),  # between the other two, whose names do not count
        ([RIGHT, WRONG, TWIN], ["d1"], 0),
        ([WRONG, RIGHT, TWIN, OTHER, RIGHT], ["d0", "d3"], 0),
        ([RIGHT, WRONG], [], 1),
        ([RIGHT, WRONG, OTHER], [], 1),
        ([RIGHT, WRONG, TWIN, WRONG], [], 1),
        ([RIGHT, None, WRONG], [], 1),
        ([RIGHT, scores(0.1, 0.8, prompts="of another release"), TWIN], [], 0),
    ],
)
def test_the_majority_is_right(all_scores: list[Scores | None], refused: list[str], num_doubts: int) -> None:
    found, doubts = check_numbers([d(number, of) for number, of in enumerate(all_scores)], {})
    assert list(found) == refused
    assert len(doubts) == num_doubts


def test_what_was_recorded_overrules_the_majority_of_its_model() -> None:
    workers = [d(0, WRONG), d(1, WRONG), d(2, RIGHT), d(3, WRONG, model="n")]
    refused, doubts = check_numbers(workers, {"m": TWIN})
    assert list(refused) == ["d0", "d1"]
    assert f"differ by 0.28 from the trusted build's, {TOLERANCE} is allowed" in refused["d0"]
    assert doubts == ["n: --trusted-numbers is of m, so it is not used"]


NOT_RECORDS = [b"", b"[]", b"{}", b'{"m": 1}', b'{"m": ["x", []]}', b'{"m": ["another", [[[0, 0.0]]]]}']


@pytest.mark.parametrize("content", [None, *NOT_RECORDS, b" " * 2**20 + msgspec.json.encode({"m": RIGHT})])
def test_a_file_that_is_no_record_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"numbers\.json"):
        read_trusted(path)


def test_a_record_is_read(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    path.write_bytes(msgspec.json.encode({"m": RIGHT}))
    assert read_trusted(path) == {"m": RIGHT}
    assert read_trusted(None) == {}


async def test_a_worker_with_other_numbers_gets_no_requests() -> None:
    async with fleet_of(d(1, RIGHT), d(2, WRONG), trusted={}) as (registry, fleet):
        await until(lambda: decodes(fleet) == ["d1", "d2"])
        assert fleet.health().refused == []
        (doubt,) = fleet.health().doubts
        assert doubt == (
            "m: the probabilities of d1 | d2 differ by 0.30; which are right cannot be known without the "
            "frontend's --trusted-numbers"
        )
        registry.show(d(1, RIGHT), d(2, WRONG), worker("p1", scores=TWIN, is_ready=False))
        await until(lambda: fleet.health().warming == ["p1"])
        assert decodes(fleet) == ["d1", "d2"]
        registry.show(d(1, RIGHT), d(2, WRONG), worker("p1", scores=TWIN))
        await until(lambda: decodes(fleet) == ["d1"])
        (refused,) = fleet.health().refused
        assert refused.startswith("d2: its probabilities differ by 0.30 from those of 2 of 3 workers")
        assert fleet.health().doubts == []
        assert [w.worker_id for w in fleet.workers("m", Role.PREFILL)] == ["p1"]


async def test_without_the_check_every_worker_serves() -> None:
    async with fleet_of(d(1, RIGHT), d(2, WRONG), d(3, RIGHT)) as (_, fleet):
        await until(lambda: decodes(fleet) == ["d1", "d2", "d3"])
