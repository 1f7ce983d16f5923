"""YAML 1.2 numbers (1e9, 1.5e3) for engine YAMLs; PyYAML reads YAML 1.1, where they are text."""

import re

import yaml

_FLOAT = "tag:yaml.org,2002:float"


def number(text: str) -> int | float:
    """A number with a point or an exponent. `1e4` is an int, so that token counts may be written so."""
    value = float(text)
    return int(value) if "e" in text.lower() and value.is_integer() else value


class Yaml12Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the floats of YAML 1.2's core schema added."""

    def construct_yaml_float(self, node: yaml.ScalarNode) -> int | float:
        """Read exponents with `number`; `.inf`, `1_000.5` and the like as YAML 1.1."""
        if "e" in node.value.lower():
            return number(node.value)
        value: float = super().construct_yaml_float(node)
        return value


Yaml12Loader.add_constructor(_FLOAT, Yaml12Loader.construct_yaml_float)
Yaml12Loader.add_implicit_resolver(
    _FLOAT, re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)$"), list("-+.0123456789")
)
