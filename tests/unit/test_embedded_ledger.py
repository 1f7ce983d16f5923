"""The block ledger: every block is counted once, whatever is reserved, pinned and freed."""

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.engines.embedded.ledger import BlockLedger, Hold, Lease
from workers.engines.prefixes import first_key, next_key

NUM_BLOCKS = 12
SIZE = 2  # tokens per block


def chain(token_ids: list[int]) -> list[bytes]:
    keys = [first_key("")]
    for start in range(0, len(token_ids) - SIZE + 1, SIZE):
        keys.append(next_key(keys[-1], array("I", token_ids[start : start + SIZE])))
    return keys[1:]


def fill(ledger: BlockLedger, lease: Lease, token_ids: list[int]) -> None:
    """All the tokens were computed or pulled."""
    for i, key in enumerate(chain(token_ids)):
        if i >= lease.num_found:
            ledger.keep(lease, i, key)


def filled(ledger: BlockLedger, token_ids: list[int]) -> Lease:
    lease = ledger.reserve(-(-len(token_ids) // SIZE))
    assert lease is not None
    fill(ledger, lease, token_ids)
    return lease


class LedgerMachine(RuleBasedStateMachine):
    """Random requests against a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger(NUM_BLOCKS)
        self.leases: list[Lease] = []
        self.written: dict[int, list[int]] = {}

    @rule(num_more=st.integers(0, 3), token_ids=st.lists(st.integers(0, 1), max_size=9))
    def reserve(self, num_more: int, token_ids: list[int]) -> None:
        """A prompt, all of whose tokens are written, and blocks for its answer."""
        num_blocks = -(-len(token_ids) // SIZE) + num_more
        num_free, num_held = self.ledger.num_free, self.num_held()
        lease = self.ledger.reserve(num_blocks, chain(token_ids))
        if lease is None:
            assert num_blocks > num_free or token_ids
            return
        assert len(set(lease.blocks)) == len(lease.blocks) == num_blocks
        assert self.num_held() - num_held >= num_blocks - lease.num_found
        for i, block in enumerate(lease.blocks):
            written = token_ids[: (i + 1) * SIZE]
            assert i >= lease.num_found or self.written[block] == written, (
                "found KV is that of the same tokens"
            )
            self.written[block] = written
        fill(self.ledger, lease, token_ids)
        self.leases.append(lease)

    def num_held(self) -> int:
        return NUM_BLOCKS - self.ledger.num_free

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        used = [lease for lease in self.leases if lease.hold is Hold.USED]
        if used:
            self.ledger.pin(data.draw(st.sampled_from(used)))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.leases:  # freed ones too: `free` is idempotent
            self.ledger.free(data.draw(st.sampled_from(self.leases)))

    @invariant()
    def every_block_is_counted_once(self) -> None:
        ledger = self.ledger
        assert ledger.num_free + ledger.num_used + ledger.num_pinned == NUM_BLOCKS

    @invariant()
    def blocks_are_held_by_leases(self) -> None:
        held = [block for lease in self.leases if lease.hold is not Hold.FREED for block in lease.blocks]
        used = {block for lease in self.leases if lease.hold is Hold.USED for block in lease.blocks}
        assert len(set(held)) == self.num_held()
        assert len(used) == self.ledger.num_used


TestLedger = LedgerMachine.TestCase


def test_only_used_blocks_can_be_pinned() -> None:
    ledger = BlockLedger(2)
    lease = ledger.reserve(1)
    assert lease is not None
    ledger.pin(lease)
    with pytest.raises(ValueError, match="pinned"):
        ledger.pin(lease)
    ledger.free(lease)
    with pytest.raises(ValueError, match="freed"):
        ledger.pin(lease)


def test_what_was_used_least_recently_goes_first_and_of_one_prompt_its_end() -> None:
    ledger = BlockLedger(4)
    for token_ids in ([1, 1, 2, 2], [3, 3, 4, 4]):
        ledger.free(filled(ledger, token_ids))
    assert ledger.num_kept == ledger.num_free == 4
    new = ledger.reserve(3)
    assert new is not None
    ledger.free(new)
    again = [ledger.reserve(2, chain(token_ids)) for token_ids in ([3, 3, 4, 4], [1, 1, 2, 2])]
    assert [lease.num_found for lease in again if lease is not None] == [1, 0]


def test_a_lease_that_does_not_fit_changes_nothing() -> None:
    ledger = BlockLedger(3)
    ledger.free(filled(ledger, [1, 1, 2, 2]))
    held = ledger.reserve(1)
    assert held is not None
    assert ledger.reserve(3, chain([1, 1, 2, 2])) is None
    found = ledger.reserve(2, chain([1, 1, 2, 2]))
    assert found is not None
    assert found.num_found == 2


def test_equal_blocks_are_found_once() -> None:
    ledger = BlockLedger(4)
    first, second = filled(ledger, [1, 1]), filled(ledger, [1, 1])
    ledger.free(second)
    ledger.free(first)
    assert (ledger.find(chain([1, 1])), ledger.num_kept) == ([first.blocks[0]], 1)


def test_keys_tell_prompts_and_salts_apart() -> None:
    keys = {first_key("a"), *chain([1, 1]), *chain([2, 1]), *chain([1, 1, 2, 2]), *chain([2, 2, 1, 1])}
    assert len(keys) == 1 + 2 + 1 + 2
    assert next_key(first_key("a"), array("I", [1, 1])) not in keys
