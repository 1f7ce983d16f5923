"""Memory describes bytes without copying them, and provides parts of itself."""

import pytest

from workers.kv.memory import host_memory, host_view


def test_a_slice_of_a_buffer_is_described_at_its_own_address_and_kept_alive() -> None:
    buffer = bytearray(b"hello")
    whole, middle = host_memory(buffer), host_memory(memoryview(buffer)[1:3])
    assert middle.address == whole.address + 1
    assert bytes(host_view(middle)) == b"el"
    del whole
    with pytest.raises(BufferError):
        buffer.extend(b"!")
    del middle
    buffer.extend(b"!")


def test_a_part_lies_inside_and_knows_the_whole() -> None:
    whole = host_memory(bytearray(range(10)))
    part = whole.part(2, 5)
    assert bytes(host_view(part)) == bytes([2, 3, 4, 5, 6])
    assert part.part(1, 1).whole is whole
    assert part.owner is whole.owner
    assert bytes(host_view(part.part(1, 1))) == bytes([3])


@pytest.mark.parametrize(("start", "num_bytes"), [(-1, 2), (0, 11), (10, 1), (3, -1)])
def test_a_part_that_sticks_out_is_refused(start: int, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="of 10"):
        host_memory(bytearray(10)).part(start, num_bytes)
