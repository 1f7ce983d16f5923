"""Settings of third-party libraries: the build's classes, Baton's own key, and its rules for a role."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.messages import NO_DRAFT
from baton.model_folder import model_folder
from workers.checkpoint import fingerprint
from workers.flags import DisaggregationMode, Speculate
from workers.settings import (
    Field,
    Fields,
    Given,
    InvalidField,
    Loaded,
    NotNegative,
    SettingsError,
    build,
    fields_of,
    first_invalid,
    put,
    read,
    refuse,
)

QUEUE_SIZE = "max_queue_size"
"""How many requests may wait for a place in the batch: Baton's own, which no library gets."""

SPECULATE = "speculate"
"""How the next tokens of answers are guessed: Baton's own, too."""

BATON = "baton"  # the source of what Baton chooses
_SET_BY_SPECULATE = "--speculate lookup sets it; leave one of the two out"
_NO_HEAD = (
    "prefill and decode workers hand over the KV of a draft model with {methods} only; leave it out, or run "
    "the worker with --disaggregation-mode agg. --speculate lookup on decode needs no model"
)
_DEFAULT_QUEUE_SIZE = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guessing:
    """One library's settings for guessed tokens. `names`: its keys, of which the first takes a mapping;
    `lookup`: that mapping for `--speculate lookup`. `methods`: those of a head, a draft model whose KV is
    handed over; `method`, `models` (equal names) and `num_tokens`: the keys that both sides must agree on."""

    names: tuple[str, ...]
    lookup: Mapping[str, object]
    methods: tuple[str, ...]
    method: str
    models: tuple[str, ...]
    num_tokens: str

    def draft(self, given: Given) -> str:
        """The method, head and number of tokens, for `KvLayout.draft`. Raises SettingsError: no such head."""
        config = mapping_of(given, self.names[0])
        name = next(filter(config.get, self.models), None)
        if name is None:
            return NO_DRAFT
        try:
            folder = model_folder(Path(str(config[name])))
        except ValueError as error:
            raise SettingsError(f"{self.names[0]}.{name}: {error}") from error
        return f"{config.get(self.method)} {fingerprint(folder) or folder.name} {config.get(self.num_tokens)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What Baton adds to one library's settings. `names`: keys of flags that the library calls differently.
    `kinds`: of values that it refuses late or never. `complete` chooses and checks values for a mode."""

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kinds: Mapping[str, Any]
    complete: Callable[[Given, DisaggregationMode], None]

    def load(self, args: Any, mode: DisaggregationMode, **sources: Any) -> Loaded[dict[str, Any]]:
        """The keywords for the library; `args` is the build's settings class, `sources` are `give`'s. Per
        leaf: flag > override > YAML > Baton's choice > the build's default. Raises what `give` raises."""
        own = {QUEUE_SIZE: Field(int, _DEFAULT_QUEUE_SIZE), SPECULATE: Field(Speculate | None, None)}
        fields = fields_of(args) | own
        loaded = build(fields, self.give(fields, mode, **sources))
        for name in own:
            loaded.settings.pop(name, None)
        return loaded

    def give(
        self,
        fields: Fields | None,
        mode: DisaggregationMode,
        *,
        yaml_path: Path | None = None,
        override: str | None = None,
        typed: Mapping[str, object] | None = None,
    ) -> Given:
        """The given values and Baton's choices, before a build validates them. Without fields (no build is
        installed) keys and types are not checked. Raises SettingsError for what no build can do in `mode`."""
        flags = {self.names.get(path, path): value for path, value in (typed or {}).items()}
        given = read(fields, yaml_path, flags, override)
        for path, kind in self.kinds.items():
            check(given, path, kind)
        check(given, QUEUE_SIZE, NotNegative)
        check_speculation(given, mode)
        self.complete(given, mode)
        return given


def check_speculation(given: Given, mode: DisaggregationMode) -> None:
    """Raise SettingsError for an unknown way to guess tokens, and if a prefill worker is to guess some."""
    if value_of(given, SPECULATE) not in (None, "lookup"):
        refuse(given, (SPECULATE,), "must be lookup, or left out")
    if mode == "prefill":
        refuse(given, (SPECULATE,), "a prefill worker generates one token; set it on the decode workers only")


def complete_speculation(given: Given, mode: DisaggregationMode, guessing: Guessing) -> None:
    """Set the library's mapping if the next tokens are to be looked up. Raises SettingsError if the user has
    set one of its keys then, or without it what a worker that hands KV over cannot do."""
    name, *others = guessing.names
    check(given, name, dict[str, object])
    if value_of(given, SPECULATE) is not None:
        refuse(given, guessing.names, _SET_BY_SPECULATE)
        put(given, name, dict(guessing.lookup), BATON)
    elif mode != "agg":
        refuse(given, others, f"set {name}")
        if (config := mapping_of(given, name)) and config.get(guessing.method) not in guessing.methods:
            refuse(given, (name,), _NO_HEAD.format(methods=" or ".join(guessing.methods)))


def mapping_of(given: Given, name: str) -> dict[str, object]:
    """A mapping's given values, from its leaf or from the leaves below it; empty if there is none."""
    value = value_of(given, name)
    below = {
        path.removeprefix(f"{name}."): v for path, (v, _) in given.items() if path.startswith(f"{name}.")
    }
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else below


def value_of(given: Given, path: str) -> object:
    """The given value, or None."""
    return given.get(path, (None, ""))[0]


def choose(given: Given, path: str, value: object) -> None:
    """Set what the user has not set; `build` leaves out what the build lacks."""
    if path not in given:
        put(given, path, value, BATON)


def demand(given: Given, path: str, value: object, why: str) -> None:
    """Set the only value that works. Raises SettingsError if the user has set another."""
    choose(given, path, value)
    found, source = given[path]
    if found != value:
        raise SettingsError(f"{source}: {path}: {found}: must be {value}: {why}")


def explained(error: ValueError, loaded: Loaded[dict[str, Any]], label: str) -> str:
    """A library's refusal of its settings as it loads, in one line with the source of the wrong one."""
    found = first_invalid(error)
    if isinstance(found, InvalidField) and found.name in loaded.values:
        _, source = loaded.given.get(found.name, (None, "default"))
        return f"{source}: {found.name}: {found}"
    return f"{label} refuses the settings: {found}"


def check(given: Given, path: str, kind: Any) -> None:
    """Raise SettingsError if this value is given and is not of that kind."""
    value, source = given.get(path, (None, ""))
    try:
        msgspec.convert(value, kind | None)
    except ValueError as error:
        raise SettingsError(f"{source}: {path}: {value!r}: {error}") from error
