"""The classes of an installed library, and which of its releases Baton was tried with."""

import dataclasses
import functools
import logging
import pkgutil
import re
from typing import Any

from workers.flags import DisaggregationMode
from workers.settings import SettingsError

log = logging.getLogger(__name__)

Release = tuple[int, int]


def part(place: str) -> Any:
    """The dataclass field of what the library has at `module:name`, imported for each instance."""
    return dataclasses.field(default_factory=functools.partial(pkgutil.resolve_name, place))


def release_of(version: str) -> Release | None:
    """Major and minor number; None if the version has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found is not None else None


def check_tried(label: str, version: str, mode: DisaggregationMode, tried: tuple[Release, ...]) -> None:
    """Warn of a release that was not tried. Raises SettingsError if it would hand KV over."""
    if release_of(version) in tried:
        return
    names = " or ".join(f"{major}.{minor}" for major, minor in tried)
    if mode != "agg":
        raise SettingsError(
            f"{label} {version}: prefill and decode workers need {label} {names}, whose KV transfer was "
            "tried; or run the worker with --disaggregation-mode agg"
        )
    log.warning("%s %s: Baton is tested with %s", label, version, names)
