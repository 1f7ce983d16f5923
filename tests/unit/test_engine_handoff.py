"""The envelope of a library's handoff: what was written comes back, all else is refused."""

from typing import Any

import msgspec
import pytest

from baton.errors import HandoffFailed
from baton.messages import KvHandoff, TokenChunk
from workers.engines.library.engine import Envelope, opened, sealed

PARAMS = {"remote_request_id": "r-1-0a0b0c0d", "remote_block_ids": ((1, 2, 3),), "remote_port": 5600}


def written(engine: str = "vLLM", version: str = "1", **changes: Any) -> KvHandoff:
    """The handoff of 5 tokens."""
    state = sealed(Envelope(engine=engine, version=version, num_cached_tokens=2, params=PARAMS))
    fields: dict[str, Any] = {"num_prompt_tokens": 5, "engine_state": state} | changes
    return KvHandoff(worker_id="p", incarnation="1", first_token=7, ttl_s=1.5, **fields)


STATE = written().engine_state


@pytest.mark.parametrize(("first_chunk", "num_tokens"), [(None, 5), (TokenChunk((7,)), 6)])
def test_a_handoff_gives_back_what_the_library_wrote(first_chunk: TokenChunk | None, num_tokens: int) -> None:
    envelope = opened(written(first_chunk=first_chunk), "vLLM", "1", num_tokens)
    assert envelope.num_cached_tokens == 2
    assert envelope.params == PARAMS | {"remote_block_ids": [[1, 2, 3]]}


@pytest.mark.parametrize("value", [object(), 1 << 64])
def test_what_cannot_be_encoded_fails_the_handoff(value: object) -> None:
    with pytest.raises(HandoffFailed, match="vLLM's parameters"):
        sealed(Envelope(engine="vLLM", version="1", num_cached_tokens=0, params={"more": value}))


@pytest.mark.parametrize(
    ("handoff", "says"),
    [
        (written(engine_state=b""), "is not vLLM's"),
        (written(engine_state=b"\x01not ours"), "is not vLLM's"),
        (written(engine_state=STATE[:-1]), "is not vLLM's"),
        (written(engine_state=STATE.replace(b"engine-1", b"engine-2")), "is not vLLM's"),
        (written(engine_state=msgspec.msgpack.encode(["embedded-1", "1", 2, {}])), "is not vLLM's"),
        (written("TensorRT-LLM"), "p's handoff is TensorRT-LLM, here vLLM"),
        (written(version="2"), "p's handoff is 2, here 1"),
        (written(num_prompt_tokens=4), "p's handoff is 4, here 5"),
        (written(first_chunk=TokenChunk((7,))), "p's handoff is 6, here 5"),
    ],
)
def test_foreign_truncated_and_other_versions_handoffs_are_refused(handoff: KvHandoff, says: str) -> None:
    with pytest.raises(HandoffFailed, match=says):
        opened(handoff, "vLLM", "1", 5)
