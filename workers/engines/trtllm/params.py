"""TensorRT-LLM's DisaggregatedParams as plain fields, which the other side's same release reads."""

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
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    fields = {name: value for name, value in values.items() if value is not None and name not in _STAYS}
    if fields.get(_LOG_PROBS):
        fields[_LOG_PROBS] = [
            [(token_id, float(e.logprob), getattr(e, "rank", None)) for token_id, e in entries.items()]
            for entries in fields[_LOG_PROBS]
        ]
    return fields


def generation_params(fields: dict[str, Any], lib: Library) -> Any:
    """DisaggregatedParams for decode. Raises HandoffFailed."""
    try:
        log_probs = [
            {token_id: lib.logprob(logprob, rank) for token_id, logprob, rank in entries}
            for entries in fields.get(_LOG_PROBS) or ()
        ]
        decoded = fields | {"request_type": "generation_only", _LOG_PROBS: log_probs or None}
        return lib.disaggregated_params(**decoded)
    except (TypeError, ValueError) as error:
        raise HandoffFailed(f"TensorRT-LLM refuses the handoff: {error}") from error


def new_handoff_id() -> int:
    """A random positive 64-bit id: equal ones, also of different prefill workers, would mix the KV of two
    requests. TensorRT-LLM reserves those below 2^40.
    """
    return 1 << 62 | secrets.randbits(62)
