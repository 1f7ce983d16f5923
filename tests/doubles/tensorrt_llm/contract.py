"""TensorRT-LLM's classes as `trtllm_contract.json` records them: names, defaults, and what they refuse."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pydantic

_FACTS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "trtllm_contract.json").read_text())
_NESTED = ("KvCacheConfig", "CacheTransceiverConfig", "MoeConfig", "CudaGraphConfig", "AttentionDpConfig")
_PLAIN = {"int": int, "float": float, "bool": bool, "str": str, "list[int]": list[int]}
_AT_LEAST = {"int>0": 1, "int>=1": 1, "int>=0": 0}

Fact = dict[str, Any]


def facts(name: str) -> dict[str, Fact]:
    """The recorded fields of a class, by name."""
    found: dict[str, Fact] = _FACTS[name]
    return found


def dataclass_of(name: str, **namespace: Any) -> type[Any]:
    """The class as a dataclass with slots and keyword-only fields: an unknown keyword is a TypeError."""
    fields = [(field, Any, dataclasses.field(default=fact["default"])) for field, fact in facts(name).items()]
    return dataclasses.make_dataclass(name, fields, kw_only=True, slots=True, namespace=namespace)


def model_of(*names: str, **nested: type[pydantic.BaseModel]) -> type[pydantic.BaseModel]:
    """The class as a pydantic model that forbids unknown keys; `nested` are the models of its fields."""
    fields: dict[str, Any] = {}
    for name in names:
        for field, fact in facts(name).items():
            kind, default = _field(fact, nested)
            fields[field] = (kind, default)
    return pydantic.create_model(
        names[-1],
        __config__=pydantic.ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True),
        **fields,
    )


def nested_models() -> dict[str, type[pydantic.BaseModel]]:
    """The recorded config classes, by name."""
    return {name: model_of(name) for name in _NESTED}


def _field(fact: Fact, nested: dict[str, type[pydantic.BaseModel]]) -> tuple[Any, Any]:
    text, default = fact["type"], fact["default"]
    plain, _, rest = text.partition("|")
    if plain in nested:
        if rest == "None" and default is None:
            return nested[plain] | None, None
        kind: Any = nested[plain] | None if rest == "None" else nested[plain]
        return kind, pydantic.Field(default_factory=nested[plain])
    return _leaf(fact, plain, rest), ... if default == "<required>" else default


def _leaf(fact: Fact, plain: str, rest: str) -> Any:
    allowed = fact.get("allowed")
    if isinstance(allowed, list) and plain == "str" and "torch dtype names" not in allowed:
        kind: Any = Literal[tuple(allowed)]
    elif plain in _AT_LEAST:
        kind = _bounded(_AT_LEAST[plain])
    else:
        kind = _PLAIN.get(plain, Any)
    return kind | None if rest == "None" and kind is not Any else Any if rest else kind


def _bounded(least: int) -> Any:
    return pydantic.conint(ge=least)
