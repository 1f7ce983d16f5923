"""Engine settings: flag > override > YAML > default, each value with its source."""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from baton.flags import without_secrets
from workers.settings_text import Node, SettingsError, read_json, read_yaml

T = TypeVar("T")

Given = dict[str, tuple[object, str]]
"""Given values, by key path of the leaf, with their sources."""

_PLAIN = {int, float, bool, str, type(None)}


class InvalidField(ValueError):
    """An invalid value of one field; the loader adds its key path and source."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Field:
    """A setting: its annotation and its default. `is_checked`: its class checks values itself."""

    def __init__(self, hint: Any, default: object, *, is_checked: bool = False) -> None:
        self.default = getattr(default, "value", default)  # of an enum
        self._kinds = list(_alternatives(hint))
        self._hint = hint
        self._is_checked = is_checked
        classes = [kind for kind in self._kinds if _is_settings(kind)]
        chosen = classes[0] if len(classes) == 1 else type(default) if type(default) in classes else None
        self.nested = Schema(chosen) if chosen is not None else None
        self.is_nullable = type(None) in self._kinds or default is None
        self.words = [word for kind in self._kinds if get_origin(kind) is Literal for word in get_args(kind)]

    def convert(self, value: object) -> object:
        """Check plain numbers, switches, text and closed lists of words, whose letter case is corrected
        (`ucx`, `UCX`). All else passes unchanged: an engine checks more than its annotations say.

        Raises ValueError.
        """
        if value is None and self.is_nullable:
            return None
        if set(self._kinds) <= _PLAIN:
            return msgspec.convert(value, self._hint)
        if not isinstance(value, str) or value in self.words or not self.words or str in self._kinds:
            return value
        for word in self.words:
            if str(word).lower() == value.lower():
                return word
        if not self._is_checked:
            raise ValueError(f"must be one of {', '.join(map(str, self.words))}")
        return value


class Schema:
    """A settings class, a dataclass or a pydantic model, read through its fields: all other keys are unknown.

    `is_root`: the engine builds it, so that it stays a dict, without the settings `own`, which are Baton's.
    """

    def __init__(self, cls: Any, *, is_root: bool = False, own: Mapping[str, Field] | None = None) -> None:
        self._cls = cls
        self._is_root = is_root
        self._own = own or {}
        self.fields: dict[str, Field] = dict(_fields(cls)) | dict(self._own)

    def at(self, path: str) -> Field | None:
        """The leaf at this key path."""
        name, _, rest = path.partition(".")
        field = self.fields.get(name)
        if field is None or (field.nested is None) == bool(rest):
            return None
        return field.nested.at(rest) if field.nested is not None else field

    def build(self, values: dict[str, object]) -> Any:
        """The settings. Raises ValueError, or InvalidField for a specific field."""
        if self._is_root:
            return {name: value for name, value in values.items() if name not in self._own}
        try:
            return self._cls(**values)
        except InvalidField:
            raise
        except ValueError as error:
            raise first_invalid(error) from error
        except TypeError as error:  # null crashes some validators
            raise ValueError(f"the engine refuses the settings: {error}") from error


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    """The settings, with each leaf's effective value and source by key path.

    A source is `flag`, `FILE:LINE`, `--override-engine-args`, `baton` or `default`.
    """

    settings: T
    given: Given
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
    schema = Schema(cls)
    given = read(schema, yaml_path, typed, override)
    return build(schema, given, str(yaml_path or "engine settings"))


def read(
    schema: Schema | None,
    yaml_path: Path | None,
    typed: Mapping[str, object],
    override: str | None = None,
) -> Given:
    """Merge all given values, leaf by leaf.

    `typed` has the values of flags, by key path (`kv_cache_config.free_gpu_memory_fraction`); `override` is a
    JSON object. Without a schema, for a library that is not installed, any key is accepted. Raises
    SettingsError.
    """
    given: Given = {}
    texts = [read_yaml(yaml_path)] if yaml_path is not None else []
    texts += [read_json(override)] if override is not None else []
    for root in texts:
        for path, value, place in _leaves(schema, root, ""):
            put(given, path, value, place)
    for path, value in typed.items():
        if schema is not None and schema.at(path) is None:
            raise SettingsError(f"flag for {path}: this engine has no such setting; remove the flag")
        put(given, path, value, "flag")
    return given


def require(holds: bool, key: str, value: object, rule: str) -> None:
    """Raise InvalidField unless the value is what it must be."""
    if not holds:
        raise InvalidField(key, f"{value!r} must be {rule}")


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
    settings = _build(schema, "", given, origin)
    effective = dict(_effective(schema, "", given))
    return Loaded(
        settings,
        given,
        {path: value for path, (value, _) in effective.items()},
        {path: source for path, (_, source) in effective.items()},
    )


def first_invalid(error: ValueError) -> ValueError:
    """The first finding of a pydantic ValidationError, on one line, as an InvalidField if it names a field.
    Other errors are returned unchanged.
    """
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return error
    finding = errors()[0]
    path, message = ".".join(str(part) for part in finding["loc"]), " ".join(finding["msg"].split())
    return InvalidField(path, f"{finding['input']!r}: {message}") if path else ValueError(message)


def _leaves(schema: Schema | None, node: Node, prefix: str) -> Iterator[tuple[str, object, str]]:
    """Path, value and place of each leaf under a node, checked against its field."""
    if node.entries is None:
        place = f"{node.place}: {prefix.rstrip('.')}".removesuffix(": ")
        raise SettingsError(f"{place}: must be a mapping")
    seen: set[str] = set()
    for name, child in node.entries:
        path = prefix + name
        if name in seen:
            raise SettingsError(f"{child.place}: {path}: given twice")
        seen.add(name)
        if schema is None:
            nested = _leaves(None, child, f"{path}.")
            yield from nested if child.entries is not None else [(path, child.value, child.place)]
            continue
        if (field := schema.fields.get(name)) is None:
            known = sorted(schema.fields)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
            raise SettingsError(f"{child.place}: {path}: unknown key; {hint}")
        if field.nested is not None and not (child.value is None and field.is_nullable):
            yield from _leaves(field.nested, child, f"{path}.")
        else:
            try:
                yield path, field.convert(child.value), child.place
            except ValueError as error:
                raise SettingsError(f"{child.place}: {path}: {child.value!r}: {error}") from error


def _build(schema: Schema, prefix: str, given: Given, origin: str) -> Any:
    values: dict[str, object] = {}
    for name, field in schema.fields.items():
        path = prefix + name
        if path in given:
            values[name] = given[path][0]
        elif field.nested is not None and _has_below(given, path):
            values[name] = _build(field.nested, f"{path}.", given, origin)
    try:
        return schema.build(values)
    except InvalidField as error:
        path = prefix + error.name
        raise SettingsError(f"{given[path][1] if path in given else origin}: {path}: {error}") from error
    except ValueError as error:
        raise SettingsError(f"{origin}: {error}") from error


def _effective(schema: Schema, prefix: str, given: Given) -> Iterator[tuple[str, tuple[object, str]]]:
    """Every leaf's value and source. A null nested mapping is a leaf: `cuda_graph_config=None`."""
    for name, field in schema.fields.items():
        path = prefix + name
        if field.nested is not None and (_has_below(given, path) or (path not in given and field.default)):
            yield from _effective(field.nested, f"{path}.", given)
        else:
            yield path, given.get(path, (field.default, "default"))


def _has_below(given: Given, path: str) -> bool:
    return any(other.startswith(f"{path}.") for other in given)


def _fields(cls: Any) -> Iterator[tuple[str, Field]]:
    for name, field in getattr(cls, "model_fields", {}).items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        yield name, Field(field.annotation, default, is_checked=True)
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.init and not field.name.startswith("_"):
            default = None if field.default is dataclasses.MISSING else field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            # An annotation given as text names a class that is imported for type checkers only.
            yield field.name, Field(Any if isinstance(field.type, str) else field.type, default)


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields"))


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The types of a union, or the annotation's only one."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in {Union, UnionType}:
        for part in get_args(annotation):
            yield from _alternatives(part)
    else:
        yield annotation
