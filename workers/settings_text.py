"""Engine settings as written in YAML or JSON: a tree of values with their sources."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from baton.yaml12 import Yaml12Loader, number

MAX_YAML_BYTES = 1 << 20
OVERRIDE = "--override-engine-args"


class SettingsError(Exception):
    """An invalid setting. The message names the file, line and key path, and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Node:
    """A value and its source; a mapping has `entries`, in the order of the text."""

    place: str
    value: object
    entries: Sequence[tuple[str, "Node"]] | None = None


def read_yaml(path: Path) -> Node:
    """The file's root. Never blocks; takes time in proportion to its size. Raises SettingsError."""
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise SettingsError(f"{path}: is not a file")
        text = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > MAX_YAML_BYTES:
        raise SettingsError(f"{path}: {len(text)} bytes; at most {MAX_YAML_BYTES} are allowed")
    try:
        if b"*" in text and any(
            isinstance(e, yaml.AliasEvent) for e in yaml.parse(text, Loader=Yaml12Loader)
        ):
            # Nine lines of them make millions of values.
            raise SettingsError(f"{path}: has an alias (*name): write the values out")
        root = yaml.compose(text, Loader=Yaml12Loader)
        return Node(f"{path}:1", None, ()) if root is None else _from_yaml(root, path, root)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise SettingsError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def _from_yaml(node: yaml.Node, path: Path, key: yaml.Node) -> Node:
    place, entries = f"{path}:{key.start_mark.line + 1}", None
    if isinstance(node, yaml.MappingNode):
        if not all(isinstance(name, yaml.ScalarNode) for name, _ in node.value):
            raise SettingsError(f"{place}: a key must be a word")
        entries = [(str(name.value), _from_yaml(value, path, name)) for name, value in node.value]
    try:
        value = Yaml12Loader("").construct_document(node)
    except Exception as error:  # PyYAML does not wrap its constructors' errors
        raise SettingsError(f"{place}: not valid YAML: {' '.join(str(error).split())}") from error
    return Node(place, value, entries)


def read_json(text: str) -> Node:
    """A JSON object's root. Raises SettingsError."""
    try:
        return _from_json(json.loads(text, parse_float=number))
    except (ValueError, RecursionError, OverflowError) as error:
        raise SettingsError(f"{OVERRIDE}: not valid JSON: {error}") from error


def _from_json(value: object) -> Node:
    entries = None
    if isinstance(value, dict):
        entries = [(str(name), _from_json(nested)) for name, nested in value.items()]
    return Node(OVERRIDE, value, entries)
