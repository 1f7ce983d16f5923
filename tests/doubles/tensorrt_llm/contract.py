"""TensorRT-LLM's classes as recorded in `trtllm_contract.json`: names, defaults, allowed values."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import pydantic

_FACTS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "trtllm_contract.json").read_text())
_PLAIN = {"int": int, "float": float, "bool": bool, "str": str, "list[int]": list[int]}
_AT_LEAST = {"int>0": 1, "int>=1": 1, "int>=0": 0}

Fact = dict[str, Any]
Models = Mapping[str, type[pydantic.BaseModel]]


def facts(name: str) -> dict[str, Fact]:
    """The recorded fields of a class, by name."""
    found: dict[str, Fact] = _FACTS[name]
    return found


def dataclass_of(name: str, *, without: str = "", **namespace: Any) -> type[Any]:
    """The class as a dataclass with slots and keyword-only fields: an unknown keyword is a TypeError."""
    fields = [
        (field, Any, dataclasses.field(default=fact["default"]))
        for field, fact in facts(name).items()
        if field != without
    ]
    return dataclasses.make_dataclass(name, fields, kw_only=True, slots=True, namespace=namespace)


def model_of(*names: str, nested: Models | None = None, **validators: Any) -> type[pydantic.BaseModel]:
    """The class as a pydantic model that forbids unknown keys; `nested` has the models of its fields."""
    fields: dict[str, Any] = {}
    for name in names:
        for field, fact in facts(name).items():
            fields[field] = _field(fact, nested or {})
    return pydantic.create_model(
        names[-1],
        __config__=pydantic.ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True),
        __validators__=validators,
        **fields,
    )


def _field(fact: Fact, nested: Models) -> tuple[Any, Any]:
    text, default = fact["type"], fact["default"]
    kinds = text.split("|")
    models = tuple(nested[kind] for kind in kinds if kind in nested)
    if models:
        kind: Any = models[0]
        if len(models) > 1:  # a union discriminated by `mode`, like CudaGraphConfigType (llm_args.py)
            kind = Annotated[Union[models], pydantic.Field(discriminator="mode")]  # noqa: UP007  of a tuple
        kind = kind | None if "None" in kinds else kind
        return kind, None if default is None else pydantic.Field(default_factory=models[0])
    plain, _, rest = text.partition("|")
    return _leaf(fact, plain, rest), ... if default == "<required>" else default


def _leaf(fact: Fact, plain: str, rest: str) -> Any:
    allowed = fact.get("allowed")
    if isinstance(allowed, list) and plain == "str" and "torch dtype names" not in allowed:
        kind: Any = Literal[tuple(allowed)]
    elif plain in _AT_LEAST:
        kind = pydantic.conint(ge=_AT_LEAST[plain])
    else:
        kind = _PLAIN.get(plain, Any)
    return kind | None if rest == "None" and kind is not Any else Any if rest else kind
