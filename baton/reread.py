"""Files that are read again when they change."""

import logging
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Generic, TypeVar

EVERY_S = 1.0

T = TypeVar("T")
log = logging.getLogger(__name__)


class Reread(Generic[T]):
    """The result of `load`, which reads some files, as `value`: of the files as they were EVERY_S ago at most
    or, while they cannot be read, as they were before. Raises what `load` raises."""

    def __init__(self, paths: Collection[Path], load: Callable[[], T]) -> None:
        self._paths = paths
        self._load = load
        self._seen = [*map(_stamp, paths)]
        self._looked_s = float("-inf")
        self._problem = ""
        self._value = load()

    @property
    def value(self) -> T:
        now_s = time.monotonic()
        if now_s - self._looked_s >= EVERY_S:
            self._looked_s = now_s
            self._look()
        return self._value

    def _look(self) -> None:
        stamps = [*map(_stamp, self._paths)]
        if stamps == self._seen:
            return
        names = ",".join(map(str, self._paths))
        try:
            self._value = self._load()
        except Exception as error:  # noqa: BLE001  tried again: a file may become readable without a change
            if self._problem != str(error):
                self._problem = str(error)
                log.error("reread=failed files=%s the content before stays in use: %s", names, error)  # noqa: TRY400  the same sentence, once
            return
        self._problem, self._seen = "", stamps
        log.info("reread=done files=%s", names)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Changes with the file's content and its mode. A name may lead to another file, as in Kubernetes."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_size, status.st_mode
