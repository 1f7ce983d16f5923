"""vLLM's classes as recorded in `vllm_contract_0.26.json`: names, annotations, defaults."""

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, Optional, Union

FACTS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vllm_contract_0.26.json").read_text())
_MADE = {"dict": dict, "list": list, "set": set}
_NAMES = {
    "Any": Any,
    "Literal": Literal,
    "NoneType": None,
    "Optional": Optional,
    "Union": Union,
    "collections": collections,
}


def dataclass_of(name: str, *, known: dict[str, Any] | None = None, **namespace: Any) -> type[Any]:
    """The recorded class as a dataclass: an unknown keyword is a TypeError. `known` are the classes in its
    annotations; a field with any other is Any."""
    recorded: dict[str, tuple[str, Any]] = FACTS[name]
    fields = [(n, _kind(text, known or {}), _default(text, value)) for n, (text, value) in recorded.items()]
    return dataclasses.make_dataclass(name, fields, namespace=namespace)


def _kind(text: str, known: dict[str, Any]) -> Any:
    for path, cls in known.items():
        if path in text:
            return eval(text.replace(path, "Known"), {**_NAMES, "Known": cls})
    try:
        return eval(text, dict(_NAMES))
    except (NameError, AttributeError):
        return Any


def _default(text: str, value: Any) -> Any:
    if value != "<made>":
        return dataclasses.field(default=value)
    return dataclasses.field(default_factory=_MADE.get(text.partition("[")[0], type(None)))
