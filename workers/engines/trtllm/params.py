"""TensorRT-LLM's DisaggregatedParams: as plain fields that another build can read, and their ids."""

import dataclasses
import secrets
from typing import Any

from baton.errors import HandoffFailed
from workers.engines.trtllm.library import Library

# Tensors, which Baton never requests, and which side is first: always prefill.
_STAYS = {"first_gen_logits", "schedule_style"}
_LOG_PROBS = "first_gen_log_probs"


def travelling(params: Any) -> dict[str, Any]:
    """The fields that are set (`opaque_state` is bytes), without TensorRT-LLM's own classes."""
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    flat = {name: value for name, value in fields.items() if value is not None and name not in _STAYS}
    if flat.get(_LOG_PROBS):
        flat[_LOG_PROBS] = [
            [(token_id, float(e.logprob), getattr(e, "rank", None)) for token_id, e in entries.items()]
            for entries in flat[_LOG_PROBS]
        ]
    return flat


def generation_params(fields: dict[str, Any], lib: Library) -> Any:
    """DisaggregatedParams for decode, from the fields that this build has: others would raise TypeError.

    Raises HandoffFailed.
    """
    known = {field.name for field in dataclasses.fields(lib.disaggregated_params)}
    values = {name: value for name, value in fields.items() if name in known}
    try:
        if values.get(_LOG_PROBS):
            values[_LOG_PROBS] = [
                {token_id: lib.logprob(logprob, rank) for token_id, logprob, rank in entries}
                for entries in values[_LOG_PROBS]
            ]
        return lib.disaggregated_params(**(values | {"request_type": "generation_only"}))
    except (TypeError, ValueError) as error:
        raise HandoffFailed(f"TensorRT-LLM refuses the handoff: {error}") from error


def new_handoff_id() -> int:
    """A random positive 64-bit id: equal ones, also of different prefill workers, would mix the KV of two
    requests. TensorRT-LLM reserves those below 2^40.
    """
    return 1 << 62 | secrets.randbits(62)
