"""Workers that join a running fleet: every pair has moved KV before clients use it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import Stack, damaged_model


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path) as stack:
        yield stack


@pytest.mark.parametrize("engine", [pytest.param("embedded", marks=pytest.mark.slow), "mocker"])
def test_each_pair_has_moved_kv_before_it_is_ready(stack: Stack, engine: str) -> None:
    workers = stack.serve("prefill", "prefill", "decode", "decode", engine=engine)

    text = "".join(worker.text() for worker in workers)
    pairs = re.findall(r"warm pair worker=(\S+) peer=(\S+)$", text, re.MULTILINE)
    assert len({frozenset(pair) for pair in pairs}) == 4
    assert "cold pair" not in text
    assert stack.gauge("baton_kv_moved_bytes_total") > 0
    stack.wait_idle()


def test_workers_with_other_weights_of_the_same_shape_are_not_paired(stack: Stack, tmp_path: Path) -> None:
    stack.serve("prefill")
    stack.worker("decode", model_path=damaged_model(tmp_path / "fine-tune"))
    stack.wait_ready(1, 1)

    (reason,) = stack.health()["refused_pairs"]
    assert re.fullmatch(r"prefill-\w+ -> decode-\w+: checkpoint \w{16} is not \w{16}", str(reason))
