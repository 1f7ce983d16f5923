"""Files that are read again when they change."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

EVERY_S = 1.0

T = TypeVar("T")
log = logging.getLogger(__name__)


class Reread(Generic[T]):
    """The result of `load`, which reads some files, as `value`. Raises what `load` raises."""

    def __init__(self, paths: Collection[Path], load: Callable[[], T]) -> None:
        self._paths = paths
        self._load = load
        self._seen = self._stamps()
        self._failed: object = None
        self._problem = ""
        self._again_s = 0.0
        self.value = load()

    def check(self) -> None:
        """Read the files again if they have changed. While that fails, `value` stays, and the same files are
        tried again after EVERY_S: a file may become readable without a change.
        """
        stamps = self._stamps()
        if stamps == self._seen or (stamps == self._failed and time.monotonic() < self._again_s):
            return
        try:
            self.value = self._load()
        except (OSError, ValueError) as error:
            self._again_s = time.monotonic() + EVERY_S
            self._failed = stamps
            if self._problem != str(error):
                self._problem = str(error)
                log.error("reread=failed files=%s the content before stays in use: %s", self._names(), error)  # noqa: TRY400  the same sentence, once
            return
        self._problem, self._seen = "", stamps
        log.info("reread=done files=%s", self._names())

    def _names(self) -> str:
        return ",".join(map(str, self._paths))

    def _stamps(self) -> list[tuple[int, ...] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Changes with the file's content and its mode. A name may lead to another file, as in Kubernetes."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_size, status.st_mode


@asynccontextmanager
async def kept_current(files: Collection[Reread[Any]], every_s: float = EVERY_S) -> AsyncIterator[None]:
    """Check the files from time to time during the context."""
    checking = asyncio.create_task(_check(files, every_s))
    try:
        yield
    finally:
        checking.cancel()
        await asyncio.wait([checking])


async def _check(files: Collection[Reread[Any]], every_s: float) -> None:
    while files:
        await asyncio.sleep(every_s)  # files do not notify
        for each in files:
            await asyncio.to_thread(each.check)  # a disk may hang
