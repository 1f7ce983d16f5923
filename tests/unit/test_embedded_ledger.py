"""The block ledger: every block is counted once, whatever is reserved, pinned and freed."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.engines.embedded.ledger import BlockLedger, Lease

NUM_BLOCKS = 12
Texts = st.lists(st.integers(0, 1), max_size=4)  # each in a block


def keys_of(texts: list[int]) -> list[bytes]:
    return [bytes(texts[: i + 1]) for i in range(len(texts))]


class LedgerMachine(RuleBasedStateMachine):
    """Random requests against a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger(NUM_BLOCKS)
        self.held: list[Lease] = []
        self.pinned: set[Lease] = set()
        self.written: dict[int, bytes] = {}

    @rule(num_more=st.integers(0, 3), texts=Texts, num_written=st.integers(0, 1))
    def reserve(self, num_more: int, texts: list[int], num_written: int) -> None:
        """A prompt, all of whose blocks are written, and blocks for its answer. The last `num_written` of the
        blocks that are found are written, too, if nobody has them."""
        num_blocks = len(texts) + num_more
        num_free, num_held = self.ledger.num_free, self.num_held()
        found = self.ledger.find(keys_of(texts))
        assert [self.written[block] for block in found] == keys_of(texts)[: len(found)]
        leased = {block for lease in self.held for block in lease.blocks}
        num_shared = len(found) - num_written if found and found[-1] not in leased else len(found)
        lease = self.ledger.reserve(num_blocks, found, num_shared)
        if lease is None:
            assert num_blocks > num_free or found
            return
        assert list(lease.blocks[: len(found)]) == found
        assert len(set(lease.blocks)) == len(lease.blocks) == num_blocks
        assert self.num_held() - num_held >= num_blocks - len(found)
        for i, key in enumerate(keys_of(texts)):
            if i >= num_shared:
                assert lease.blocks[i] not in self.ledger.find([key])
                self.written[lease.blocks[i]] = key
            self.ledger.keep(lease, i, key)
        self.held.append(lease)

    def num_held(self) -> int:
        return NUM_BLOCKS - self.ledger.num_free

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if used := [lease for lease in self.held if lease not in self.pinned]:
            self.pinned.add(lease := data.draw(st.sampled_from(used)))
            self.ledger.pin(lease)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.ledger.free(lease)
            self.pinned.discard(lease)

    @invariant()
    def every_block_is_counted_once(self) -> None:
        ledger = self.ledger
        assert ledger.num_free + ledger.num_used + ledger.num_pinned == NUM_BLOCKS

    @invariant()
    def blocks_are_held_by_leases(self) -> None:
        assert len({block for lease in self.held for block in lease.blocks}) == self.num_held()
        pinned = {block for lease in self.pinned for block in lease.blocks}
        assert len(pinned) == self.ledger.num_pinned


TestLedger = LedgerMachine.TestCase


def test_what_was_used_least_recently_is_forgotten_first_and_of_one_prompt_its_end() -> None:
    ledger = BlockLedger(4)
    first, second = keys_of([1, 2]), keys_of([3, 4])
    for keys in (first, second):
        lease = ledger.reserve(2)
        assert lease is not None
        for i, key in enumerate(keys):
            ledger.keep(lease, i, key)
        ledger.free(lease)
    assert ledger.num_kept == ledger.num_free == 4
    assert ledger.reserve(3) is not None
    assert [len(ledger.find(keys)) for keys in (first, second)] == [0, 1]
