"""Reads an engine YAML into leaves by key path; duplicates and mistakes are told, not raised."""

from pathlib import Path

import yaml

from baton.doctor.facts import EngineYaml

_MAX_BYTES = 1 << 20


def read_engine_yaml(path: Path) -> EngineYaml:
    """Never raises: `problem` says what is wrong with the file, with its line where there is one."""
    try:
        text = path.read_bytes()
        if len(text) > _MAX_BYTES:
            return EngineYaml(
                path=str(path), problem=f"{len(text)} bytes; an engine YAML has at most {_MAX_BYTES}"
            )
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and not isinstance(root, yaml.MappingNode):
            return EngineYaml(path=str(path), problem="the file must be a mapping (key: value)")
        values: dict[str, object] = {}
        duplicates: list[str] = []
        if root is not None:
            _walk(root, "", path, values, duplicates)
    except OSError as error:
        return EngineYaml(path=str(path), problem=f"cannot be read: {error.strerror}")
    except yaml.YAMLError as error:
        return EngineYaml(path=str(path), problem=f"not valid YAML: {' '.join(str(error).split())}")
    return EngineYaml(path=str(path), values=values, duplicates=tuple(duplicates))


def _walk(
    node: yaml.MappingNode, prefix: str, path: Path, values: dict[str, object], duplicates: list[str]
) -> None:
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        if key in seen:
            duplicates.append(f"{path}:{key_node.start_mark.line + 1}: {key}")
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode):
            _walk(value_node, f"{key}.", path, values, duplicates)
        else:
            values[key] = yaml.SafeLoader("").construct_document(value_node)
