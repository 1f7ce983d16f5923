"""The envelope of a library's handoff: what was written comes back, all else is refused."""

from typing import Any

import msgspec
import pytest

from baton.errors import HandoffFailed
from baton.messages import KvHandoff, TokenChunk
from workers.engines.library.engine import Envelope, opened

PARAMS = {"remote_request_id": "r-1-0a0b0c0d", "remote_block_ids": ((1, 2, 3),), "remote_port": 5600}


def written(**changes: Any) -> KvHandoff:
    """The handoff of 5 tokens."""
    state = Envelope(num_cached_tokens=2, params=PARAMS).sealed()
    fields: dict[str, Any] = {"num_prompt_tokens": 5, "engine_state": state} | changes
    return KvHandoff(worker_id="p", incarnation="1", first_token=7, ttl_s=1.5, **fields)


STATE = written().engine_state


@pytest.mark.parametrize(("first_chunk", "num_tokens"), [(None, 5), (TokenChunk((7,)), 6)])
def test_a_handoff_gives_back_what_the_library_wrote(first_chunk: TokenChunk | None, num_tokens: int) -> None:
    envelope = opened(written(first_chunk=first_chunk), num_tokens)
    assert envelope.num_cached_tokens == 2
    assert envelope.params == PARAMS | {"remote_block_ids": [[1, 2, 3]]}


@pytest.mark.parametrize("value", [object(), 1 << 64])
def test_what_cannot_be_encoded_fails_the_handoff(value: object) -> None:
    with pytest.raises(HandoffFailed, match="parameters cannot travel"):
        Envelope(num_cached_tokens=0, params={"more": value}).sealed()


@pytest.mark.parametrize(
    ("handoff", "says"),
    [
        (written(engine_state=b""), "p is not of a library"),
        (written(engine_state=b"\x01not ours"), "p is not of a library"),
        (written(engine_state=STATE[:-1]), "p is not of a library"),
        (written(engine_state=STATE.replace(b"engine-2", b"engine-1")), "p is not of a library"),
        (written(engine_state=msgspec.msgpack.encode(["embedded-1", 2, {}])), "p is not of a library"),
        (written(num_prompt_tokens=4), "p has 4 tokens, the request 5"),
        (written(first_chunk=TokenChunk((7,))), "p has 6 tokens, the request 5"),
    ],
)
def test_foreign_and_truncated_handoffs_and_those_of_other_requests_are_refused(
    handoff: KvHandoff, says: str
) -> None:
    with pytest.raises(HandoffFailed, match=says):
        opened(handoff, 5)
