"""Reads an engine YAML into leaves by key path; duplicates and mistakes are told, not raised."""

from pathlib import Path

import yaml

from operations.doctor.facts import EngineYaml
from baton.yaml12 import Yaml12Loader

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 8


class _UnreadableError(Exception):
    """The message says what is wrong, and in which line."""


def read_engine_yaml(path: Path) -> EngineYaml:
    """Never raises, never waits: `problem` says what is wrong with the file."""
    values: dict[str, object] = {}
    duplicates: list[str] = []
    try:
        root = yaml.compose(_text(path), Loader=Yaml12Loader)
        if root is not None:
            _walk(root, "", path, values, duplicates)
    except OSError as error:
        return EngineYaml(path=str(path), problem=f"cannot be read: {error.strerror}")
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        return EngineYaml(path=str(path), problem=f"not valid YAML: {' '.join(str(error).split())}")
    except _UnreadableError as error:
        return EngineYaml(path=str(path), problem=str(error))
    return EngineYaml(path=str(path), values=values, duplicates=tuple(duplicates))


def _text(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise _UnreadableError("is no file")  # a pipe may never end
    text = path.read_bytes()
    if len(text) > _MAX_BYTES:
        raise _UnreadableError(f"{len(text)} bytes; an engine YAML has at most {_MAX_BYTES}")
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=Yaml12Loader)):
        raise _UnreadableError(
            "has an alias (*name): write the values out"
        )  # nine lines of them make millions
    return text


def _walk(node: yaml.Node, prefix: str, path: Path, values: dict[str, object], duplicates: list[str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        raise _UnreadableError("the file must be a mapping (key: value)")
    if prefix.count(".") > _MAX_DEPTH:
        raise _UnreadableError(f"{prefix} lies too deep for a setting")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise _UnreadableError(f"{place}: a key must be a word")
        key = f"{prefix}{key_node.value}"
        if key in seen:
            duplicates.append(f"{place}: {key}")
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode):
            _walk(value_node, f"{key}.", path, values, duplicates)
        else:
            values[key] = _value(value_node, f"{place}: {key}")


def _value(node: yaml.Node, place: str) -> object:
    try:
        return Yaml12Loader("").construct_document(node)
    except Exception as error:  # PyYAML lets IndexError, ValueError and others through
        raise _UnreadableError(f"not valid YAML: {place}: {' '.join(str(error).split())}") from error
