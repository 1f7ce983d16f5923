"""A file for health checks, fresh while this worker is ready and its event loop runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.pace import Pulse
from workers.settings_text import SettingsError

_BEAT_S = 1.0


def clear(path: Path | None) -> None:
    """Remove what an earlier process left there. Raises SettingsError if the file cannot be written."""
    if path is None:
        return
    try:
        path.touch()
        path.unlink()
    except OSError as error:
        raise SettingsError(f"--ready-file {path}: {error.strerror}; its folder must be writable") from error


@contextmanager
def beating(path: Path | None) -> Iterator[None]:
    """Touch the file every second during the context, then remove it."""
    if path is None:
        yield
        return
    path.touch()
    pulse = Pulse(_BEAT_S, path.touch)
    try:
        yield
    finally:
        pulse.stop()
        path.unlink(missing_ok=True)
