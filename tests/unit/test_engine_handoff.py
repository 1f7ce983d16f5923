"""The envelope of a third-party engine's handoff: what was written comes back, all else is refused."""

from typing import Any

import msgspec
import pytest

from baton.errors import HandoffFailed
from baton.messages import GenerateRequest, KvHandoff, Sampling, TokenChunk
from workers.engines.library.handoff import Handoffs

PARAMS = {"remote_request_id": "r-1-0a0b0c0d", "remote_block_ids": ((1, 2, 3),), "remote_port": 5600}


def handoffs(engine: str = "vLLM", version: str = "1") -> Handoffs:
    return Handoffs(engine, version, worker_id="p", incarnation="1")


def written(
    by: Handoffs,
    params: dict[str, Any] = PARAMS,
    num_tokens: int = 5,
    first_chunk: TokenChunk | None = None,
) -> KvHandoff:
    request = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=[1] * num_tokens,
        sampling=Sampling(max_tokens=9, seed=0),
        deadline_s=1,
    )
    return by.write(request, params, first_token=7, num_cached_tokens=2, ttl_s=1.5, first_chunk=first_chunk)


OURS = handoffs()
STATE = written(OURS).engine_state


def test_a_handoff_gives_back_what_the_engine_wrote() -> None:
    handoff = written(OURS)
    envelope = OURS.open(handoff, 5)

    assert (handoff.worker_id, handoff.incarnation) == ("p", "1")
    assert (handoff.first_token, handoff.num_prompt_tokens, handoff.ttl_s) == (7, 5, 1.5)
    assert handoff.first_chunk is None
    assert envelope.num_cached_tokens == 2
    assert envelope.params == PARAMS | {"remote_block_ids": [[1, 2, 3]]}


@pytest.mark.parametrize("value", [object(), 1 << 64])
def test_what_cannot_be_encoded_fails_the_handoff(value: object) -> None:
    with pytest.raises(HandoffFailed, match="vLLM's parameters cannot travel"):
        written(OURS, PARAMS | {"more": value})


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (b"", "is not vLLM's"),
        (b"\x01not ours", "is not vLLM's"),
        (STATE[:-1], "is not vLLM's"),
        (STATE.replace(b"engine-1", b"engine-2"), "is not vLLM's"),
        (msgspec.msgpack.encode(["embedded-1", "1", 2, {}]), "is not vLLM's"),
        (written(handoffs("TensorRT-LLM")).engine_state, "worker p is TensorRT-LLM's, not vLLM's"),
        (written(handoffs(version="2")).engine_state, "vLLM of prefill worker p is 2, of this worker 1"),
    ],
)
def test_foreign_truncated_and_other_versions_bytes_are_refused(state: bytes, says: str) -> None:
    with pytest.raises(HandoffFailed, match=says):
        OURS.open(msgspec.structs.replace(written(OURS), engine_state=state), 5)


@pytest.mark.parametrize("num_tokens", [4, 6])
def test_the_handoff_of_another_prompt_is_refused_with_both_lengths(num_tokens: int) -> None:
    with pytest.raises(HandoffFailed, match=f"has {num_tokens} tokens, its request 5"):
        OURS.open(written(OURS, num_tokens=num_tokens), 5)


def test_a_first_chunk_is_one_of_the_tokens_of_the_request_that_follows() -> None:
    handoff = written(OURS, first_chunk=TokenChunk((7,)))
    assert handoff.first_chunk == TokenChunk((7,))
    assert OURS.open(handoff, 6).params["remote_port"] == 5600
    with pytest.raises(HandoffFailed, match="has 6 tokens, its request 5"):
        OURS.open(handoff, 5)


def test_parameters_that_cannot_travel_fail_the_handoff() -> None:
    with pytest.raises(HandoffFailed, match="cannot travel"):
        written(OURS, {"remote_port": object()})
