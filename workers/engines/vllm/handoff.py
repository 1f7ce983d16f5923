"""vLLM's kv_transfer_params on their way, as bytes that another worker of the same version can open."""

from typing import Any

import msgspec

from baton.errors import HandoffFailed
from baton.messages import KvHandoff

# What prefill is told: keep the KV for somebody else.
KEEP: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class HandoffState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="vllm-1"):
    """What goes into `KvHandoff.engine_state`: NIXL's parameters as vLLM wrote them, and the prompt's tokens
    that prefill found in its cache, for decode counts the whole transferred prompt as cached.
    """

    version: str
    num_cached_tokens: int
    params: dict[str, Any]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(HandoffState)


def pack(params: dict[str, Any], *, version: str, num_cached_tokens: int) -> bytes:
    """The bytes for `KvHandoff.engine_state`. Raises HandoffFailed."""
    state = HandoffState(version=version, num_cached_tokens=num_cached_tokens, params=params)
    try:
        return _ENCODER.encode(state)
    except (TypeError, OverflowError) as error:
        raise HandoffFailed(f"vLLM's kv_transfer_params cannot travel: {error}") from error


def unpack(handoff: KvHandoff, *, version: str, num_tokens: int) -> HandoffState:
    """Open a handoff for a request of `num_tokens`. Raises HandoffFailed, with both values, if it is
    another engine's, another version's or another prompt's.
    """
    try:
        state = _DECODER.decode(handoff.engine_state)
    except msgspec.DecodeError as error:
        raise HandoffFailed(f"the handoff of worker {handoff.worker_id} is not vLLM's: {error}") from error
    if state.version != version:
        raise HandoffFailed(
            f"vLLM of prefill worker {handoff.worker_id} is {state.version}, of this worker {version}"
        )
    if handoff.num_prompt_tokens != num_tokens:
        raise HandoffFailed(f"the handoff has {handoff.num_prompt_tokens} tokens, its request {num_tokens}")
    return state


def num_blocks(params: dict[str, Any]) -> int:
    """KV blocks that prefill keeps: `remote_block_ids` has a list for each group of layers."""
    groups = params.get("remote_block_ids") or ()
    return sum(len(group) if isinstance(group, (list, tuple)) else 1 for group in groups)
