"""What the embedded engine refuses of handoffs."""

from typing import Any

import msgspec
import pytest

from baton.errors import HandoffFailed
from baton.messages import KvHandoff, KvLayout, TokenLogprob
from workers.engines.embedded.runner import VERSIONS
from workers.engines.embedded.transfer import HandoffState, opened
from workers.kv.transceiver import Ticket

LAYOUT = KvLayout(dtype="float32", tokens_per_block=8, num_layers=2, num_kv_heads=2, head_dim=4)
STATE = HandoffState(
    version=VERSIONS,
    layout=LAYOUT,
    ticket=Ticket(wire="tcp", offer_id=1, num_bytes=640, address="x", secret=b""),
    logprob=TokenLogprob(7, -0.5),
)
HANDOFF = KvHandoff(
    worker_id="p",
    incarnation="i",
    first_token=7,
    num_prompt_tokens=5,
    ttl_s=9.0,
    engine_state=msgspec.msgpack.encode(STATE),
)

# With a seventh field, of lists in lists.
DEEP = b"\x97" + HANDOFF.engine_state[1:] + b"\x91" * 100_000 + b"\xc0"


def open_it(handoff: KvHandoff = HANDOFF, **ours: Any) -> HandoffState:
    fields: dict[str, Any] = {"layout": LAYOUT, "num_tokens": 5, "num_bytes": 640}
    return opened(handoff, **(fields | ours))


def test_a_handoff_is_opened_for_its_own_request_only() -> None:
    assert open_it() == STATE
    other = msgspec.structs.replace(STATE, version="2")
    with pytest.raises(HandoffFailed, match="engine of prefill worker p is 2, of this worker transformers"):
        open_it(msgspec.structs.replace(HANDOFF, engine_state=msgspec.msgpack.encode(other)))
    for ours, what in (
        ({"layout": msgspec.structs.replace(LAYOUT, num_layers=3)}, "KV layout"),
        ({"num_tokens": 6}, "number of tokens"),
        ({"num_bytes": 641}, "number of KV bytes"),
    ):
        with pytest.raises(HandoffFailed, match=f"{what} of prefill worker p"):
            open_it(**ours)


@pytest.mark.parametrize("state", [b"", b"\x01not ours", HANDOFF.engine_state[:-1], b"\x91\xa6mocker", DEEP])
def test_what_another_engine_wrote_is_not_opened(state: bytes) -> None:
    with pytest.raises(HandoffFailed, match="worker p is not the embedded engine's"):
        open_it(msgspec.structs.replace(HANDOFF, engine_state=state))
