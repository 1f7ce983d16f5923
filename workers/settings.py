"""Engine settings from YAML: typed flag > YAML > default; each value has a source, each error a line."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
import yaml

T = TypeVar("T")

MAX_YAML_BYTES = 1 << 20


class SettingsError(Exception):
    """A setting that cannot be used. The message names file, line and key path, and what would be right."""


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    """The settings, and where each leaf came from: `flag`, `FILE:LINE` or `default`, by key path."""

    settings: T
    sources: dict[str, str]

    def lines(self) -> list[str]:
        """`key.path=value (source)` for each leaf, for the one print at start."""
        return [f"{path}={_at(self.settings, path)} ({source})" for path, source in self.sources.items()]


def load_settings(cls: type[T], yaml_path: Path | None, typed: Mapping[str, object]) -> Loaded[T]:
    """Build `cls`, a dataclass of leaves and of other such dataclasses.

    `typed` are the values of flags that were typed, by key path (`kv_cache_config.free_gpu_memory_fraction`).
    Raises SettingsError.
    """
    given: dict[str, tuple[object, str]] = {}
    if yaml_path is not None:
        given |= _read_yaml(cls, yaml_path)
    known = _leaf_paths(cls)
    for path, value in typed.items():
        if path not in known:
            raise SettingsError(f"flag for {path}: this engine has no such setting; leave the flag out")
        given[path] = (value, "flag")
    sources = {path: given[path][1] if path in given else "default" for path in known}
    try:
        return Loaded(_build(cls, "", given), sources)
    except ValueError as error:
        raise SettingsError(f"{yaml_path or 'engine settings'}: {error}") from error


def _read_yaml(cls: type, path: Path) -> dict[str, tuple[object, str]]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > MAX_YAML_BYTES:
        raise SettingsError(f"{path}: {len(text)} bytes; an engine YAML has at most {MAX_YAML_BYTES}")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not valid YAML: {error}") from error
    if root is None:
        return {}
    found: dict[str, tuple[object, str]] = {}
    _walk(cls, root, "", path, found)
    return found


def _walk(cls: type, node: yaml.Node, prefix: str, path: Path, found: dict[str, tuple[object, str]]) -> None:
    """Collect the leaves under `node` by key path, each checked against the type of its field."""
    if not isinstance(node, yaml.MappingNode):
        raise SettingsError(f"{_place(path, node)}: {prefix.rstrip('.') or 'the file'}: must be a mapping")
    hints = get_type_hints(cls)
    for key_node, value_node in node.value:
        key = str(key_node.value)
        where = _place(path, key_node)
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known: {', '.join(sorted(hints))}"
            raise SettingsError(f"{where}: {prefix}{key}: unknown key{hint}")
        if prefix + key in found or any(other.startswith(f"{prefix}{key}.") for other in found):
            raise SettingsError(f"{where}: {prefix}{key}: given twice")
        if dataclasses.is_dataclass(hints[key]):
            _walk(hints[key], value_node, f"{prefix}{key}.", path, found)
            continue
        value = yaml.SafeLoader("").construct_document(value_node)
        try:
            found[prefix + key] = (msgspec.convert(value, hints[key]), where)
        except msgspec.ValidationError as error:
            raise SettingsError(f"{where}: {prefix}{key}: {value!r}: {error}") from error


def _place(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _leaf_paths(cls: type, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, kind in get_type_hints(cls).items():
        nested = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        found += _leaf_paths(kind, f"{prefix}{name}.") if nested else [prefix + name]
    return found


def _build(cls: type[T], prefix: str, given: Mapping[str, tuple[object, str]]) -> T:
    values: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            values[name] = _build(kind, f"{prefix}{name}.", given)  # type: ignore[arg-type]
        elif prefix + name in given:
            values[name] = given[prefix + name][0]
    return cls(**values)


def _at(settings: object, path: str) -> object:
    for name in path.split("."):
        settings = getattr(settings, name)
    return settings
