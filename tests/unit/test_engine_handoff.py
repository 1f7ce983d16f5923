"""The envelope of a third-party engine's handoff: what was written comes back, all else is refused."""

import msgspec
import pytest

from baton.errors import HandoffFailed
from baton.messages import KvHandoff
from workers.engines.handoff import Envelopes

PARAMS = {"remote_request_id": "r-1-0a0b0c0d", "remote_block_ids": ((1, 2, 3),), "remote_port": 5600}
OURS = Envelopes("vLLM", "1")
STATE = OURS.pack(PARAMS, 2)


def handoff(state: bytes, num_tokens: int = 5) -> KvHandoff:
    return KvHandoff(
        worker_id="p",
        incarnation="1",
        first_token=7,
        num_prompt_tokens=num_tokens,
        ttl_s=1,
        engine_state=state,
    )


def test_a_handoff_gives_back_what_the_engine_wrote() -> None:
    envelope = OURS.open(handoff(STATE), 5)

    assert envelope.num_cached_tokens == 2
    assert envelope.params == PARAMS | {"remote_block_ids": [[1, 2, 3]]}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (b"", "is not vLLM's"),
        (b"\x01not ours", "is not vLLM's"),
        (STATE[:-1], "is not vLLM's"),
        (STATE.replace(b"engine-1", b"engine-2"), "is not vLLM's"),
        (msgspec.msgpack.encode(["embedded-1", "1", 2, {}]), "is not vLLM's"),
        (Envelopes("TensorRT-LLM", "1").pack(PARAMS, 2), "worker p is TensorRT-LLM's, not vLLM's"),
        (Envelopes("vLLM", "2").pack(PARAMS, 2), "vLLM of prefill worker p is 2, of this worker 1"),
    ],
)
def test_foreign_truncated_and_other_versions_bytes_are_refused(state: bytes, says: str) -> None:
    with pytest.raises(HandoffFailed, match=says):
        OURS.open(handoff(state), 5)


def test_the_handoff_of_another_prompt_is_refused_with_both_lengths() -> None:
    with pytest.raises(HandoffFailed, match="has 4 tokens, its request 5"):
        OURS.open(handoff(STATE, 4), 5)


def test_parameters_that_cannot_travel_fail_the_handoff() -> None:
    with pytest.raises(HandoffFailed, match="cannot travel"):
        OURS.pack({"remote_port": object()}, 0)
