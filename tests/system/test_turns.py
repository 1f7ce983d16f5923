"""A conversation costs its new tokens: on the demo model, with caches, prefix routing and local prefill."""

from collections.abc import Iterator

import pytest

from tests.stack import Stack
from tests.tool_conversation import Turn, answers_of, converse

NUM_TURNS = 4
TOKEN_BYTES = 8 * 2 * 2 * 64 * 4  # layers, K and V, heads, head dim, float32


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Stack]]:
    """Two frontends of the same workers: one asks decode first, the other does not."""
    folder = tmp_path_factory.mktemp
    with Stack(folder("turns")) as local, Stack(folder("other")) as handing:
        handing.environ |= {"BATON_FILE_REGISTRY": local.environ["BATON_FILE_REGISTRY"]}
        local.frontend("--router-mode", "prefix", "--local-prefill-tokens", "150")
        handing.frontend("--router-mode", "prefix")
        for mode in ("prefill", "decode", "decode"):
            local.worker(mode, engine="embedded")
        for stack in (local, handing):
            stack.wait_ready(1, 2, 120)
        yield local, handing


def new_tokens(turns: list[Turn]) -> int:
    return sum(turn.num_new_tokens for turn in turns)


@pytest.mark.slow  # tests/unit/test_embedded_reuse.py and tests/contract/test_engine.py count tokens, too
def test_turns_compute_and_move_their_new_tokens_only(stacks: tuple[Stack, Stack]) -> None:
    local, handing = stacks
    turns = converse(local, NUM_TURNS)
    assert turns[-1].num_prompt_tokens > 2 * turns[-1].num_new_tokens
    assert [turn.num_handoffs for turn in turns] == [1] + [0] * (NUM_TURNS - 1)
    assert sum(turn.num_computed_tokens for turn in turns) < 1.05 * new_tokens(turns)

    moving = converse(handing, NUM_TURNS)
    assert answers_of(moving) == answers_of(turns)
    assert sum(turn.num_handoffs for turn in moving) == NUM_TURNS
    moved_bytes = sum(turn.moved_bytes for turn in moving)
    assert handing.spent("baton_request_moved_kv_bytes") == (moved_bytes, NUM_TURNS)
    assert 0 < moved_bytes < 1.05 * new_tokens(moving) * TOKEN_BYTES

    # Each request with a salt of its own: no KV is found.
    alone = converse(handing, NUM_TURNS, salt=None)
    assert answers_of(alone) == answers_of(turns)
    assert all(turn.num_computed_tokens == turn.num_prompt_tokens for turn in alone)
