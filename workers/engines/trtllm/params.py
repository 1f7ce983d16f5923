"""TensorRT-LLM's DisaggregatedParams: as plain fields that another build can read, and their ids."""

import dataclasses
import enum
import secrets
from typing import Any, get_args, get_type_hints

from baton.errors import HandoffFailed
from workers.engines.trtllm.library import Library

# Tensors, which Baton never requests.
_STAYS = {"first_gen_logits"}
_LOG_PROBS = "first_gen_log_probs"


def travelling(params: Any) -> dict[str, Any]:
    """The fields that are set (`opaque_state` is bytes), without TensorRT-LLM's own classes."""
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    flat = {
        name: value.value if isinstance(value, enum.Enum) else value
        for name, value in fields.items()
        if value is not None and name not in _STAYS
    }
    if flat.get(_LOG_PROBS):
        flat[_LOG_PROBS] = [_flat(entries) for entries in flat[_LOG_PROBS]]
    return flat


def generation_params(fields: dict[str, Any], lib: Library) -> Any:
    """DisaggregatedParams for decode, from the fields that this build has: others would raise TypeError.

    Raises HandoffFailed.
    """
    cls = lib.disaggregated_params
    known = {field.name for field in dataclasses.fields(cls)}
    values = {name: value for name, value in fields.items() if name in known}
    try:
        if "schedule_style" in values:
            values["schedule_style"] = _member(cls, "schedule_style", values["schedule_style"])
        if values.get(_LOG_PROBS):
            values[_LOG_PROBS] = [_rebuilt(entries, lib) for entries in values[_LOG_PROBS]]
        return cls(**(values | {"request_type": "generation_only"}))
    except (TypeError, ValueError) as error:
        raise HandoffFailed(f"TensorRT-LLM refuses the handoff: {error}") from error


def _flat(entries: dict[int, Any]) -> list[tuple[int, float, int | None]]:
    return [(token_id, float(e.logprob), getattr(e, "rank", None)) for token_id, e in entries.items()]


def _rebuilt(entries: list[tuple[int, float, int | None]], lib: Library) -> dict[int, Any]:
    return {token_id: lib.logprob(logprob, rank) for token_id, logprob, rank in entries}


def _member(cls: Any, name: str, value: object) -> object:
    """`value` as an enum member, if the field is an enum in this build."""
    hint = get_type_hints(cls).get(name)
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return kind(value)
    return value


def new_handoff_id() -> int:
    """A random positive 64-bit id: equal ones, also of different prefill workers, would mix the KV of two
    requests. TensorRT-LLM reserves those below 2^40.
    """
    return 1 << 62 | secrets.randbits(62)
