"""Engine settings as written in YAML or JSON."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

MAX_YAML_BYTES = 1 << 20
OVERRIDE = "--override-engine-args"


class SettingsError(Exception):
    """An invalid setting. The message names its source and key path, and what is allowed."""


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
    """The file's value. Never blocks; takes time in proportion to its size. Raises SettingsError."""
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise SettingsError(f"{path}: is not a file")
        text = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > MAX_YAML_BYTES:
        raise SettingsError(f"{path}: {len(text)} bytes; at most {MAX_YAML_BYTES} are allowed")
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  a safe one
    except Exception as error:  # PyYAML does not wrap its constructors' errors
        raise SettingsError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def read_json(text: str) -> object:
    """The value of the override. Raises SettingsError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{OVERRIDE}: not valid JSON: {error}") from error
