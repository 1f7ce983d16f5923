"""Adapts the installed build's engine arguments (dataclasses) to the settings loader."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from workers.settings import Schema

_PLAIN = {int, float, bool, str, type(None)}


class ArgsSchema:
    """A vLLM dataclass, read through its fields: settings that this build lacks are unknown.

    The root is left as a dict: `AsyncEngineArgs` is built once the process may load it.
    """

    def __init__(self, cls: Any, *, is_root: bool = False) -> None:
        self._cls = cls
        self._is_root = is_root

    @functools.cached_property
    def _fields(self) -> dict[str, "dataclasses.Field[Any]"]:
        return {
            field.name: field
            for field in dataclasses.fields(self._cls)
            if field.init and not field.name.startswith("_")
        }

    @functools.cached_property
    def _hints(self) -> dict[str, Any]:
        """The annotations; those given as text name classes that vLLM imports for type checkers only."""
        return {name: Any if isinstance(f.type, str) else f.type for name, f in self._fields.items()}

    @functools.cached_property
    def _nested(self) -> dict[str, Schema | None]:
        kinds = {name: _nested(self._hints[name]) for name in self._fields}
        return {name: ArgsSchema(kind) if kind is not None else None for name, kind in kinds.items()}

    def fields(self) -> Mapping[str, Schema | None]:
        """See `Schema`."""
        return self._nested

    def nullable(self, name: str) -> bool:
        """See `Schema`."""
        return self.default(name) is None

    def convert(self, name: str, value: object) -> object:
        """Check plain numbers, switches, text, and words of closed lists. All else passes unchanged: vLLM's
        own checks know more than its annotations.
        """
        hint = self._hints[name]
        if value is None and self.default(name) is None:
            return None
        if set(get_args(hint) or (hint,)) <= _PLAIN:
            return msgspec.convert(value, hint)
        words = list(_words(hint))
        if words and isinstance(value, str) and str not in get_args(hint) and value not in words:
            raise ValueError(f"must be one of {', '.join(map(str, words))}")
        return value

    def default(self, name: str) -> object:
        """See `Schema`."""
        field = self._fields[name]
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        return (
            None if field.default is dataclasses.MISSING else getattr(field.default, "value", field.default)
        )

    def build(self, values: dict[str, object]) -> Any:
        """See `Schema`."""
        return values if self._is_root else self._cls(**values)


def _nested(hint: Any) -> Any:
    """The settings class in an annotation such as `KVTransferConfig | None`, or None."""
    classes = [kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)]
    return classes[0] if len(classes) == 1 else None


def _words(hint: Any) -> Iterator[Any]:
    """The words of the `Literal` in an annotation."""
    for kind in (hint, *get_args(hint)):
        if get_origin(kind) is Literal:
            yield from get_args(kind)
