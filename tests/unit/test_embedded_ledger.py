"""The block ledger: every block is counted once, whatever is reserved, pinned and freed."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.engines.embedded.ledger import BlockLedger, Hold, Lease

NUM_BLOCKS = 12


class LedgerMachine(RuleBasedStateMachine):
    """Random requests against a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger(NUM_BLOCKS)
        self.leases: list[Lease] = []

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 2))
    def reserve(self, num_blocks: int) -> None:
        num_free = self.ledger.num_free
        lease = self.ledger.reserve(num_blocks)
        assert (lease is None) == (num_blocks > num_free)
        if lease is not None:
            assert len(lease.blocks) == num_blocks
            self.leases.append(lease)

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
    def no_block_has_two_holders(self) -> None:
        held = [block for lease in self.leases if lease.hold is not Hold.FREED for block in lease.blocks]
        assert len(held) == len(set(held)) == NUM_BLOCKS - self.ledger.num_free


TestLedger = LedgerMachine.TestCase


def test_only_used_blocks_can_be_pinned() -> None:
    ledger = BlockLedger(2)
    lease = ledger.reserve(1)
    assert lease is not None
    ledger.free(lease)
    with pytest.raises(ValueError, match="freed"):
        ledger.pin(lease)
