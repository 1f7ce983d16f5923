"""Which handoffs the embedded engine takes: those of its own version and layout that fit the request."""

import msgspec
import pytest

from baton.errors import HandoffFailed
from baton.messages import KvHandoff, KvLayout
from workers.engines.embedded.handoff import HandoffState, check_fits, pack, unpack
from workers.kv.transceiver import Ticket

LAYOUT = KvLayout(dtype="bfloat16", tokens_per_block=32, num_layers=2, num_kv_heads=2, head_dim=64)
OTHER = msgspec.structs.replace(LAYOUT, head_dim=32)
STATE = HandoffState(
    version="1", layout=LAYOUT, ticket=Ticket(wire="tcp", offer_id=1, num_bytes=100, peer=b"")
)
# With a seventh field, of lists in lists.
DEEP = b"\x97" + pack(STATE)[1:] + b"\x91" * 100_000 + b"\xc0"


def handoff(state: bytes = pack(STATE), first_token: int = 9) -> KvHandoff:
    return KvHandoff(
        worker_id="p",
        incarnation="p",
        first_token=first_token,
        num_prompt_tokens=3,
        ttl_s=9,
        engine_state=state,
    )


def test_one_of_the_same_version_and_layout_is_taken() -> None:
    assert unpack(handoff(), version="1", layout=LAYOUT) == STATE


@pytest.mark.parametrize(
    ("state", "version", "layout", "why"),
    [
        (pack(STATE), "2", LAYOUT, "engine of prefill worker p is 1, of this worker 2"),
        (pack(STATE), "1", OTHER, "KV layout of prefill worker p is"),
        (b"\xff", "1", LAYOUT, "the handoff of worker p is not the embedded engine's"),
        (DEEP, "1", LAYOUT, "the handoff of worker p is not the embedded engine's"),
    ],
)
def test_another_is_refused_with_the_reason(state: bytes, version: str, layout: KvLayout, why: str) -> None:
    with pytest.raises(HandoffFailed, match=why):
        unpack(handoff(state), version=version, layout=layout)


@pytest.mark.parametrize(
    ("num_tokens", "num_bytes", "first_token", "why"),
    [
        (3, 100, 9, None),
        (3, 100, 0, None),
        (4, 100, 9, "has 3 tokens, the request 4"),
        (2, 100, 9, "has 3 tokens, the request 2"),
        (3, 99, 9, "offers 100 bytes of KV, but 99 are needed"),
        (3, 101, 9, "offers 100 bytes of KV, but 101 are needed"),
        (3, 100, 10, "first token 10 is not in the vocabulary of 10"),
        (3, 100, -1, "first token -1 is not in the vocabulary of 10"),
    ],
)
def test_it_must_be_the_kv_of_this_request(
    num_tokens: int, num_bytes: int, first_token: int, why: str | None
) -> None:
    def check() -> None:
        given = handoff(first_token=first_token)
        check_fits(given, STATE, num_tokens=num_tokens, num_bytes=num_bytes, vocab_size=10)

    if why is None:
        check()
    else:
        with pytest.raises(HandoffFailed, match=why):
            check()
