"""TensorRT-LLM's DisaggregatedParams on their way: every field, as bytes that another build can open."""

import dataclasses
import enum
from typing import Any, get_args, get_type_hints

import msgspec

from baton.errors import HandoffFailed
from baton.messages import KvHandoff
from workers.engines.trtllm.library import Library

# Tensors, which nobody here asks for.
_STAYS = {"first_gen_logits"}


class FlatLogprob(msgspec.Struct, frozen=True, array_like=True):
    """TensorRT-LLM's Logprob of one token, without its class."""

    token_id: int
    logprob: float
    rank: int | None


class HandoffState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="trtllm-1"):
    """What goes into `KvHandoff.engine_state`. `fields` are those of DisaggregatedParams that are set,
    `opaque_state` as bytes among them; `num_cached_tokens` is what prefill found, for decode counts the
    whole transferred prompt as cached.
    """

    version: str
    num_cached_tokens: int
    fields: dict[str, Any]
    first_gen_log_probs: list[list[FlatLogprob]] | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(HandoffState)


def pack(params: Any, *, version: str, num_cached_tokens: int) -> bytes:
    """The bytes for `KvHandoff.engine_state` from what prefill's result holds. Raises HandoffFailed."""
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    log_probs = fields.pop("first_gen_log_probs", None)
    state = HandoffState(
        version=version,
        num_cached_tokens=num_cached_tokens,
        fields={
            name: value.value if isinstance(value, enum.Enum) else value
            for name, value in fields.items()
            if value is not None and name not in _STAYS
        },
        first_gen_log_probs=[_flat(entries) for entries in log_probs] if log_probs else None,
    )
    try:
        return _ENCODER.encode(state)
    except (TypeError, OverflowError) as error:
        raise HandoffFailed(f"TensorRT-LLM's DisaggregatedParams cannot travel: {error}") from error


def unpack(handoff: KvHandoff, *, version: str, num_tokens: int) -> HandoffState:
    """Open a handoff for a request of `num_tokens`. Raises HandoffFailed, with both values, if it is
    another engine's, another version's or another prompt's.
    """
    try:
        state = _DECODER.decode(handoff.engine_state)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise HandoffFailed(
            f"the handoff of worker {handoff.worker_id} is not TensorRT-LLM's: {error}"
        ) from error
    if state.version != version:
        raise HandoffFailed(
            f"TensorRT-LLM of prefill worker {handoff.worker_id} is {state.version}, of this worker {version}"
        )
    if handoff.num_prompt_tokens != num_tokens:
        raise HandoffFailed(f"the handoff has {handoff.num_prompt_tokens} tokens, its request {num_tokens}")
    return state


def generation_params(state: HandoffState, lib: Library) -> Any:
    """The DisaggregatedParams for decode: the fields that this build has; an unknown one would be a
    TypeError. Raises HandoffFailed.
    """
    cls = lib.disaggregated_params
    known = {field.name for field in dataclasses.fields(cls)}
    values = {name: value for name, value in state.fields.items() if name in known}
    if "schedule_style" in values:
        values["schedule_style"] = _member(cls, "schedule_style", values["schedule_style"])
    if state.first_gen_log_probs is not None and "first_gen_log_probs" in known:
        values["first_gen_log_probs"] = [_rebuilt(entries, lib) for entries in state.first_gen_log_probs]
    try:
        return cls(**(values | {"request_type": "generation_only"}))
    except (TypeError, ValueError) as error:
        raise HandoffFailed(f"TensorRT-LLM refuses the handoff: {error}") from error


def _flat(entries: dict[int, Any]) -> list[FlatLogprob]:
    return [
        FlatLogprob(token_id, float(entry.logprob), getattr(entry, "rank", None))
        for token_id, entry in entries.items()
    ]


def _rebuilt(entries: list[FlatLogprob], lib: Library) -> dict[int, Any]:
    return {entry.token_id: lib.logprob(entry.logprob, entry.rank) for entry in entries}


def _member(cls: Any, name: str, value: object) -> object:
    """The enum member of `value` if the field is an enum in this build."""
    hint = get_type_hints(cls).get(name)
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return kind(value)
    return value
