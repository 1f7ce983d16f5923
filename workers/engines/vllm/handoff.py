"""vLLM's kv_transfer_params: those that prefill is given, and what those it returns say."""

from typing import Any

# Keep the KV for another worker.
KEEP: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# How many tokens the kept KV has.
NUM_TOKENS = "remote_num_tokens"


def num_blocks(params: dict[str, Any]) -> int:
    """KV blocks that prefill keeps: `remote_block_ids` has a list per group of layers."""
    groups = params.get("remote_block_ids") or ()
    return sum(len(group) if isinstance(group, (list, tuple)) else 1 for group in groups)
