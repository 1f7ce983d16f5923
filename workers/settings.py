"""Engine settings: flag > override > YAML > default, each value with its source."""

import dataclasses
import difflib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, get_type_hints

import msgspec

from baton.flags import without_secrets
from workers.settings_text import Node, SettingsError, read_json, read_yaml

T = TypeVar("T")
log = logging.getLogger(__name__)

Given = dict[str, tuple[object, str]]
"""Given values, by key path of the leaf, with their sources."""


class InvalidField(ValueError):
    """An invalid value of one field; the loader adds its key path and source."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Schema(Protocol):
    """What the loader needs to know about a settings class."""

    def fields(self) -> Mapping[str, "Schema | None"]:
        """The known keys; None is a leaf, a schema a nested mapping."""
        ...

    def nullable(self, name: str) -> bool:
        """Whether a nested mapping may be null."""
        ...

    def convert(self, name: str, value: object) -> object:
        """Convert a leaf to its field's type. Raises ValueError."""
        ...

    def default(self, name: str) -> object:
        """The default of a leaf, or of a nested mapping whose default is not one."""
        ...

    def build(self, values: dict[str, object]) -> Any:
        """Build the settings. Raises ValueError, or InvalidField for a specific field."""
        ...


class DataclassSchema:
    """A schema of (nested) dataclasses."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._hints = get_type_hints(cls)

    def fields(self) -> Mapping[str, Schema | None]:
        """See `Schema`."""
        nested: dict[str, Any] = {
            n: kind for n, kind in self._hints.items() if dataclasses.is_dataclass(kind)
        }
        return {name: DataclassSchema(nested[name]) if name in nested else None for name in self._hints}

    def nullable(self, name: str) -> bool:  # noqa: ARG002  a nested dataclass is never null
        """See `Schema`."""
        return False

    def convert(self, name: str, value: object) -> object:
        """See `Schema`."""
        return msgspec.convert(value, self._hints[name])

    def default(self, name: str) -> object:
        """See `Schema`."""
        return next(field.default for field in dataclasses.fields(self._cls) if field.name == name)

    def build(self, values: dict[str, object]) -> Any:
        """See `Schema`."""
        return self._cls(**values)


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    """The settings, with each leaf's effective value and source by key path.

    A source is `flag`, `FILE:LINE`, `--override-engine-args` or `default`.
    """

    settings: T
    values: dict[str, Any]
    sources: dict[str, str]

    def lines(self) -> list[str]:
        """`key.path=value (source)` for each leaf, to print at start."""
        return [
            without_secrets(f"{path}={self.values[path]} ({source})") for path, source in self.sources.items()
        ]


def load_settings(
    cls: type[T], yaml_path: Path | None, typed: Mapping[str, object], override: str | None = None
) -> Loaded[T]:
    """Build the dataclass `cls`; see `read` and `build`. Raises SettingsError."""
    schema = DataclassSchema(cls)
    given = read(schema, yaml_path, typed, override)
    return build(schema, given, str(yaml_path or "engine settings"))


def read(
    schema: Schema | None,
    yaml_path: Path | None,
    typed: Mapping[str, object],
    override: str | None = None,
    *,
    renamed: Mapping[str, str] | None = None,
    optional: Mapping[str, str] | None = None,
) -> Given:
    """Merge all given values, leaf by leaf.

    `typed` has the values of flags, by key path (`kv_cache_config.free_gpu_memory_fraction`); `override` is a
    JSON object; `renamed` gives hints for unknown keys, `optional` the reasons why some keys may be dropped.
    Without a schema, for a library that is not installed, any other key is accepted. Raises SettingsError.
    """
    given: Given = {}
    walk = _Walk(given, renamed or {}, optional or {})
    if yaml_path is not None:
        walk.enter(schema, read_yaml(yaml_path), "")
    if override is not None:
        walk.enter(schema, read_json(override), "")
    for path, value in typed.items():
        if not has(schema, path):
            raise SettingsError(f"flag for {path}: this engine has no such setting; remove the flag")
        put(given, path, value, "flag")
    return given


def require(holds: bool, key: str, value: object, rule: str) -> None:
    """Raise InvalidField unless the value is what it must be."""
    if not holds:
        raise InvalidField(key, f"{value!r} must be {rule}")


def require_counts(given: Given, names: Iterable[str]) -> None:
    """Raise SettingsError if one of these values is given and is no whole number above 0."""
    for path in names:
        value, source = given.get(path, (None, ""))
        if value is not None and (type(value) is not int or value < 1):
            raise SettingsError(f"{source}: {path}: {value!r}: must be a whole number of at least 1")


def require_share(given: Given, path: str) -> None:
    """Raise SettingsError if this value is given and is no share: above 0, at most 1."""
    value, source = given.get(path, (None, ""))
    if value is not None and not (type(value) in {int, float} and 0 < value <= 1):  # type: ignore[operator]  # a number
        raise SettingsError(f"{source}: {path}: {value!r}: must be a number above 0 and at most 1")


def put(given: Given, path: str, value: object, source: str) -> None:
    """Set a leaf; drops values above or below it (a mapping that was or becomes null)."""
    for other in [p for p in given if p.startswith(f"{path}.") or path.startswith(f"{p}.")]:
        del given[other]
    given[path] = (value, source)


def refuse(given: Given, names: Iterable[str], why: str) -> None:
    """Raise SettingsError if one of these keys, or one below it, has a value other than null."""
    for path, (value, source) in given.items():
        if value is not None and any(path == name or path.startswith(f"{name}.") for name in names):
            raise SettingsError(f"{source}: {path}: {why}")


def build(schema: Schema, given: Given, origin: str) -> Loaded[Any]:
    """Build the settings. `origin` is named in errors that concern no single key.

    Raises SettingsError.
    """
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    settings = _build(schema, "", given, origin)
    _effective(schema, "", given, values, sources)
    return Loaded(settings, values, sources)


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Collects the leaves under a node and checks each against its field."""

    given: Given
    renamed: Mapping[str, str]
    optional: Mapping[str, str]

    def enter(self, schema: Schema | None, node: Node, prefix: str) -> None:
        if node.entries is None:
            place = f"{node.place}: {prefix.rstrip('.')}".removesuffix(": ")
            raise SettingsError(f"{place}: must be a mapping")
        seen: set[str] = set()
        for name, child in node.entries:
            if name in seen:
                raise SettingsError(f"{child.place}: {prefix}{name}: given twice")
            seen.add(name)
            if schema is None and prefix + name not in self.renamed:
                self._take_as_it_stands(child, prefix + name)
            else:
                self._take(schema, child, prefix, name)

    def _take_as_it_stands(self, node: Node, path: str) -> None:
        if node.entries is None:
            put(self.given, path, node.value, node.place)
        else:
            self.enter(None, node, f"{path}.")

    def _take(self, schema: Schema | None, node: Node, prefix: str, name: str) -> None:
        fields, path = schema.fields() if schema is not None else {}, prefix + name
        if schema is None or name not in fields:
            self._refuse(fields, prefix, name, node)
        elif (nested := fields[name]) is None or (node.value is None and schema.nullable(name)):
            put(self.given, path, self._leaf(schema, name, path, node), node.place)
        else:
            self.enter(nested, node, f"{path}.")

    def _refuse(self, fields: Mapping[str, Schema | None], prefix: str, name: str, node: Node) -> None:
        path = prefix + name
        if path not in self.optional:
            raise SettingsError(f"{node.place}: {path}: unknown key{self._hint(fields, prefix, name)}")
        log.warning("dropped %s=%s (%s): %s", path, node.value, node.place, self.optional[path])

    def _leaf(self, schema: Schema, name: str, path: str, node: Node) -> object:
        try:
            return schema.convert(name, node.value)
        except ValueError as error:
            raise SettingsError(f"{node.place}: {path}: {node.value!r}: {error}") from error

    def _hint(self, fields: Mapping[str, Schema | None], prefix: str, name: str) -> str:
        if prefix + name in self.renamed:
            return f"; {self.renamed[prefix + name]}"
        near = difflib.get_close_matches(name, fields, n=1)
        return f"; did you mean {prefix}{near[0]}?" if near else f"; known: {', '.join(sorted(fields))}"


def has(schema: Schema | None, path: str) -> bool:
    """Whether this key path is a leaf; without a schema it may be."""
    if schema is None:
        return True
    name, _, rest = path.partition(".")
    fields = schema.fields()
    if name not in fields:
        return False
    nested = fields[name]
    return not rest if nested is None else bool(rest) and has(nested, rest)


def _build(schema: Schema, prefix: str, given: Given, origin: str) -> Any:
    values: dict[str, object] = {}
    for name, nested in schema.fields().items():
        path = prefix + name
        if path in given:
            values[name] = given[path][0]
        elif nested is not None and any(other.startswith(f"{path}.") for other in given):
            values[name] = _build(nested, f"{path}.", given, origin)
    try:
        return schema.build(values)
    except InvalidField as error:
        path = prefix + error.name
        raise SettingsError(f"{given[path][1] if path in given else origin}: {path}: {error}") from error
    except ValueError as error:
        raise SettingsError(f"{origin}: {error}") from error


def _effective(
    schema: Schema, prefix: str, given: Given, values: dict[str, object], sources: dict[str, str]
) -> None:
    """Every leaf's value and source. A null nested mapping is a leaf: `cuda_graph_config=None`."""
    for name, nested in schema.fields().items():
        path = prefix + name
        below = any(other.startswith(f"{path}.") for other in given)
        if path in given:
            values[path], sources[path] = given[path]
        elif nested is None or (schema.nullable(name) and not below and schema.default(name) is None):
            values[path], sources[path] = schema.default(name), "default"
        else:
            _effective(nested, f"{path}.", given, values, sources)
