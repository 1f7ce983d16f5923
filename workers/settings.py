"""Engine settings: flag > override > YAML > default, each value with its source."""

import dataclasses
import difflib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from baton.flags import without_secrets

T = TypeVar("T")

Given = dict[str, tuple[object, str]]
"""Given values, by key path of the leaf, with their sources."""

MAX_YAML_BYTES = 1 << 20
OVERRIDE = "--override-engine-args"
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

_PLAIN = {int, float, bool, str, type(None)}


class SettingsError(Exception):
    """An invalid setting. The message names its source and key path, and what is allowed."""


class InvalidField(ValueError):
    """An invalid value of one field; the loader adds its key path and source."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Field:
    """A setting. `is_checked`: its class checks values itself. `cls` and `fields`: the settings class of its
    values, if there is one, and what that consists of."""

    def __init__(self, hint: Any, default: object, *, is_checked: bool = False) -> None:
        self.default = getattr(default, "value", default)  # of an enum
        self._kinds = list(_alternatives(hint))
        self._hint = hint
        self._is_checked = is_checked
        classes = [
            kind
            for kind in self._kinds
            if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields"))
        ]
        self.cls = classes[0] if len(classes) == 1 else type(default) if type(default) in classes else None
        self.fields: Fields = fields_of(self.cls) if self.cls is not None else {}
        self.is_nullable = type(None) in self._kinds or default is None
        words = [word for kind in self._kinds if get_origin(kind) is Literal for word in get_args(kind)]
        self._words = {str(word).lower(): word for word in words}

    def convert(self, value: object) -> object:
        """Check plain values, and words of closed lists, whose letter case is corrected (`ucx`, `UCX`). All
        else passes unchanged: an engine checks more than its annotations say. Raises ValueError."""
        if value is None and self.is_nullable:
            return None
        if set(self._kinds) <= _PLAIN:
            return msgspec.convert(value, self._hint)
        if not isinstance(value, str) or not self._words or str in self._kinds:
            return value
        if value.lower() not in self._words and not self._is_checked:
            raise ValueError(f"must be one of {', '.join(map(str, self._words.values()))}")
        return self._words.get(value.lower(), value)


Fields = dict[str, Field]
"""What a settings class, a dataclass or a pydantic model, consists of. All other keys are unknown."""


def fields_of(cls: Any) -> Fields:
    """The fields of a settings class, by name."""
    found = {}
    for name, field in getattr(cls, "model_fields", {}).items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        found[name] = Field(field.annotation, default, is_checked=True)
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.init and not field.name.startswith("_"):
            default = None if field.default is dataclasses.MISSING else field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            # An annotation given as text names a class that is imported for type checkers only.
            found[field.name] = Field(Any if isinstance(field.type, str) else field.type, default)
    return found


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    """The settings, what was given, and each leaf's effective value by key path. A source is `flag`, the
    YAML's path, `--override-engine-args` or `baton`."""

    settings: T
    given: Given
    values: dict[str, Any]

    def lines(self) -> list[str]:
        """`key.path=value (source)` for each leaf that is not the default, to print at start."""
        return [without_secrets(f"{path}={value} ({by})") for path, (value, by) in self.given.items()]


def load_settings(
    cls: type[T], yaml_path: Path | None, typed: Mapping[str, object], override: str | None = None
) -> Loaded[T]:
    """Build the dataclass `cls`; see `read` and `build`. Raises SettingsError."""
    fields = fields_of(cls)
    given = read(fields, yaml_path, typed, override)
    loaded = build(fields, given)
    return Loaded(_built(cls, loaded.settings, "", given), given, loaded.values)


def read(
    fields: Fields | None,
    yaml_path: Path | None,
    typed: Mapping[str, object],
    override: str | None = None,
) -> Given:
    """Merge all given values, leaf by leaf. `typed` has those of flags, by key path; `override` is a JSON
    object. Without fields, for a library that is not installed, any key is accepted. Raises SettingsError."""
    given: Given = {}
    sources = [(str(yaml_path), read_yaml(yaml_path))] if yaml_path is not None else []
    sources += [(OVERRIDE, read_json(override))] if override is not None else []
    sources += [
        ("flag", reduce(lambda below, name: {name: below}, reversed(path.split(".")), value))
        for path, value in typed.items()
    ]
    for source, values in sources:
        for path, value in _leaves(fields, values, "", source):
            put(given, path, value, source)
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
            raise _refusal(source, path, why)


def build(fields: Fields, given: Given) -> Loaded[dict[str, Any]]:
    """The keywords for a class with these fields, the settings below them built. Raises SettingsError."""
    values: dict[str, Any] = {}
    return Loaded(_keywords(fields, "", given, values), given, values)


def first_invalid(error: Exception) -> Exception:
    """The first finding of a pydantic ValidationError, on one line, as an InvalidField if it names a field.
    Other errors are returned unchanged."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return error
    finding = errors()[0]
    path, message = ".".join(str(part) for part in finding["loc"]), " ".join(finding["msg"].split())
    return InvalidField(path, f"{finding['input']!r}: {message}") if path else ValueError(message)


def _leaves(fields: Fields | None, values: object, prefix: str, source: str) -> Iterator[tuple[str, object]]:
    """Path and value of each leaf below `prefix`, checked against its field."""
    if not isinstance(values, dict):
        raise _refusal(source, prefix.rstrip("."), "must be a mapping")
    for name, value in values.items():
        path, field = f"{prefix}{name}", (fields or {}).get(name)
        if fields is None:
            is_mapping = isinstance(value, dict)
        elif field is not None:
            is_mapping = field.cls is not None and not (value is None and field.is_nullable)
        else:
            known = sorted(fields)
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
            raise _refusal(source, path, f"unknown key; {hint}")
        if is_mapping:
            yield from _leaves(field.fields if field else None, value, f"{path}.", source)
            continue
        try:
            yield path, field.convert(value) if field is not None else value
        except ValueError as error:
            raise _refusal(source, path, f"{value!r}: {error}") from error


def _refusal(source: str, path: str, problem: str) -> SettingsError:
    """Without a path if the problem is the whole source."""
    return SettingsError(": ".join(filter(None, (source, path, problem))))


def _keywords(fields: Fields, prefix: str, given: Given, values: dict[str, Any]) -> dict[str, Any]:
    """What is given below `prefix`; adds every leaf's value to `values`. A null nested mapping is a leaf:
    `cuda_graph_config=None`."""
    keywords: dict[str, Any] = {}
    for name, field in fields.items():
        path = prefix + name
        is_given = path in given
        has_below = field.cls is not None and any(other.startswith(f"{path}.") for other in given)
        if has_below or (field.cls is not None and field.default and not is_given):
            below = _keywords(field.fields, f"{path}.", given, values)
            if has_below:
                keywords[name] = _built(field.cls, below, f"{path}.", given)
        else:
            values[path] = given[path][0] if is_given else field.default
            if is_given:
                keywords[name] = values[path]
    return keywords


def _built(cls: Any, keywords: dict[str, Any], prefix: str, given: Given) -> Any:
    try:
        return cls(**keywords)
    except (ValueError, TypeError) as error:  # TypeError: null crashes some validators
        invalid = first_invalid(error)
        path = prefix + invalid.name if isinstance(invalid, InvalidField) else prefix.rstrip(".")
        below = (source for other, (_, source) in given.items() if other.startswith(prefix))
        source = given[path][1] if path in given else next(below, "engine settings")
        raise _refusal(source, path, str(invalid)) from error


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


class _Loader(yaml.SafeLoader):
    """Refuses aliases (nine lines of them make millions of values) and repeated keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("an alias (*name): write the values out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode))
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"{repeated[0]} is given twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> object:
    """The file's value, a mapping if it is empty. Never blocks; takes time in proportion to its size. Raises
    SettingsError."""
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise SettingsError(f"{path}: is not a file")
        text = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > MAX_YAML_BYTES:
        raise SettingsError(f"{path}: {len(text)} bytes; at most {MAX_YAML_BYTES} are allowed")
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506  a safe one
    except Exception as error:  # PyYAML does not wrap its constructors' errors
        raise SettingsError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    return {} if value is None else value


def read_json(text: str) -> object:
    """The value of the override. Raises SettingsError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{OVERRIDE}: not valid JSON: {error}") from error
