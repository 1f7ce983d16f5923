"""The block ledger: every block is counted once, whatever is reserved, pinned and freed."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.engines.embedded.ledger import BlockLedger, Hold, Lease, first_key, next_key

NUM_BLOCKS = 12


def chain(words: list[int]) -> list[bytes]:
    keys = [first_key("")]
    for word in words:
        keys.append(next_key(keys[-1], [word]))
    return keys[1:]


class LedgerMachine(RuleBasedStateMachine):
    """Random requests against a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger(NUM_BLOCKS)
        self.leases: list[Lease] = []
        self.written: dict[int, list[int]] = {}

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 2), words=st.lists(st.integers(0, 1), max_size=4))
    def reserve(self, num_blocks: int, words: list[int]) -> None:
        """A prompt with a block for each word, all of which are computed."""
        words = words[:num_blocks]
        keys = chain(words)
        num_free, num_held = self.ledger.num_free, self.num_held()
        lease = self.ledger.reserve(num_blocks, keys)
        if lease is None:
            assert num_blocks > num_free or keys
            return
        assert len(set(lease.blocks)) == len(lease.blocks) == num_blocks
        assert self.num_held() - num_held >= num_blocks - lease.num_found
        for i in range(lease.num_found):
            assert self.written[lease.blocks[i]] == words[: i + 1], "found KV is that of the same words"
        for i in range(lease.num_found, num_blocks):
            self.written[lease.blocks[i]] = words[: i + 1] if i < len(words) else []
            if i < len(words):
                self.ledger.keep(lease, i, keys[i])
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
    ledger.free(lease)
    with pytest.raises(ValueError, match="freed"):
        ledger.pin(lease)


def test_what_was_used_least_recently_is_forgotten_first_and_of_one_prompt_its_end() -> None:
    ledger = BlockLedger(4)
    for words in ([1, 2], [3, 4]):
        lease = ledger.reserve(2)
        assert lease is not None
        for i, key in enumerate(chain(words)):
            ledger.keep(lease, i, key)
        ledger.free(lease)
    assert ledger.num_kept == ledger.num_free == 4
    new = ledger.reserve(3)
    assert new is not None
    ledger.free(new)
    again = [ledger.reserve(2, chain(words)) for words in ([3, 4], [1, 2])]
    assert [lease.num_found for lease in again if lease is not None] == [1, 0]


def test_a_lease_that_does_not_fit_changes_nothing() -> None:
    ledger = BlockLedger(3)
    lease = ledger.reserve(2)
    assert lease is not None
    for i, key in enumerate(chain([1, 2])):
        ledger.keep(lease, i, key)
    ledger.free(lease)
    held = ledger.reserve(1)
    assert held is not None
    assert ledger.reserve(3, chain([1, 2])) is None
    found = ledger.reserve(2, chain([1, 2]))
    assert found is not None
    assert found.num_found == 2


def test_keys_tell_prompts_and_salts_apart() -> None:
    keys = {first_key(""), first_key("a"), *chain([1]), *chain([2]), *chain([1, 2]), *chain([2, 1])}
    assert len(keys) == 2 + 2 + 2
    assert next_key(first_key("a"), [1]) not in keys
