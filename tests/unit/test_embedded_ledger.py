"""The block ledger: every block is counted once, whatever is reserved, pinned and freed."""

from array import array

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.engines.embedded.ledger import BlockLedger, End, Lease, Prefix
from workers.engines.prefixes import first_key, next_key

NUM_BLOCKS = 12
SIZE = 2  # tokens per block


def chain(token_ids: list[int]) -> list[bytes]:
    keys = [first_key("")]
    for start in range(0, len(token_ids) - SIZE + 1, SIZE):
        keys.append(next_key(keys[-1], array("I", token_ids[start : start + SIZE])))
    return keys


def prefix(token_ids: list[int]) -> Prefix:
    return Prefix(chain(token_ids), token_ids, len(token_ids))


def fill(ledger: BlockLedger, lease: Lease, token_ids: list[int]) -> End | None:
    """All the tokens were computed or pulled."""
    keys = chain(token_ids)
    for i in range(len(keys) - 1):
        ledger.keep(lease, i, keys[i + 1])
    rest = token_ids[(len(keys) - 1) * SIZE :]
    return End(len(keys) - 1, keys[-1], rest) if rest else None


def filled(ledger: BlockLedger, token_ids: list[int]) -> tuple[Lease, End | None]:
    lease = ledger.reserve(-(-len(token_ids) // SIZE))
    assert lease is not None
    return lease, fill(ledger, lease, token_ids)


class LedgerMachine(RuleBasedStateMachine):
    """Random requests against a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger(NUM_BLOCKS, SIZE)
        self.ends: dict[Lease, End | None] = {}  # of what is held
        self.pinned: set[Lease] = set()
        self.written: dict[int, list[int]] = {}

    @rule(num_more=st.integers(0, 3), token_ids=st.lists(st.integers(0, 1), max_size=9))
    def reserve(self, num_more: int, token_ids: list[int]) -> None:
        """A prompt, all of whose tokens are written, and blocks for its answer."""
        num_blocks = -(-len(token_ids) // SIZE) + num_more
        num_free, num_held = self.ledger.num_free, self.num_held()
        lease = self.ledger.reserve(num_blocks, prefix(token_ids))
        if lease is None:
            assert num_blocks > num_free or token_ids
            return
        assert len(set(lease.blocks)) == len(lease.blocks) == num_blocks
        num_found = lease.num_found // SIZE
        assert self.num_held() - num_held >= num_blocks - num_found
        assert lease.num_found <= len(token_ids)
        for i in range(-(-lease.num_found // SIZE)):
            end = min((i + 1) * SIZE, lease.num_found)
            assert self.written[lease.blocks[i]][:end] == token_ids[:end], "found KV is of the same tokens"
        for i in range(num_found, num_blocks):
            self.written[lease.blocks[i]] = token_ids[: (i + 1) * SIZE]
        self.ends[lease] = fill(self.ledger, lease, token_ids)

    def num_held(self) -> int:
        return NUM_BLOCKS - self.ledger.num_free

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if used := [lease for lease in self.ends if lease not in self.pinned]:
            self.pinned.add(lease := data.draw(st.sampled_from(used)))
            self.ledger.pin(lease)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.ends:
            lease = data.draw(st.sampled_from(list(self.ends)))
            self.ledger.free(lease, self.ends.pop(lease))
            self.pinned.discard(lease)

    @invariant()
    def every_block_is_counted_once(self) -> None:
        ledger = self.ledger
        assert ledger.num_free + ledger.num_used + ledger.num_pinned == NUM_BLOCKS

    @invariant()
    def blocks_are_held_by_leases(self) -> None:
        assert len({block for lease in self.ends for block in lease.blocks}) == self.num_held()
        pinned = {block for lease in self.pinned for block in lease.blocks}
        assert len(pinned) == self.ledger.num_pinned


TestLedger = LedgerMachine.TestCase


def test_what_was_used_least_recently_is_forgotten_first_and_of_one_prompt_its_end() -> None:
    ledger = BlockLedger(4, SIZE)
    for token_ids in ([1, 1, 2, 2], [3, 3, 4, 4]):
        ledger.free(*filled(ledger, token_ids))
    assert ledger.num_kept == ledger.num_free == 4
    new = ledger.reserve(3)
    assert new is not None
    ledger.free(new)
    again = [ledger.reserve(2, prefix(token_ids)) for token_ids in ([3, 3, 4, 4], [1, 1, 2, 2])]
    assert [lease.num_found for lease in again if lease is not None] == [SIZE, 0]


def test_the_end_of_a_sequence_is_continued_by_one() -> None:
    ledger = BlockLedger(6, SIZE)
    first, end = filled(ledger, [1, 1, 2])
    unshared = ledger.reserve(2, prefix([1, 1, 2, 2]))  # its last block is still written
    assert unshared is not None
    assert unshared.num_found == SIZE
    ledger.free(first, end)
    ledger.free(unshared)
    leases = [ledger.reserve(2, prefix([1, 1, 2, 5])) for _ in range(2)]
    assert [lease.num_found for lease in leases if lease is not None] == [3, SIZE]
    assert leases[0] is not None
    assert leases[0].blocks[1] == first.blocks[1]


def test_of_two_ends_the_later_is_found_and_of_an_end_what_is_equal() -> None:
    ledger = BlockLedger(8, 3)
    for token_ids in ([7, 8], [7, 9], [7, 9]):
        lease = ledger.reserve(1)
        assert lease is not None
        ledger.free(lease, End(0, first_key(""), token_ids))
    assert ledger.num_kept == 1
    wanted = Prefix([first_key("")], [7, 8, 9], 3)
    found = ledger.reserve(1, wanted)
    assert found is not None
    assert found.num_found == 1
    assert ledger.num_kept == 0
    ledger.free(found)
    everything = ledger.reserve(8)
    assert everything is not None
    ledger.free(everything)
    assert ledger.num_kept == 0, "no block is taken for what it held before"
