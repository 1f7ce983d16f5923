"""Discovery on one machine: a folder with one locked file for each worker; nothing to install."""

import asyncio
import fcntl
import logging
import os
import stat
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from baton.discovery import MAX_WORKER_BYTES, MAX_WORKERS, decode_worker
from baton.messages import WorkerInfo
from baton.registry_folder import make_private

log = logging.getLogger(__name__)

_POLL_S = 0.05
_SUFFIX = ".json"
_UNFINISHED = ".tmp"


class FilesDiscovery:
    """See `Discovery`. The folder must be on a local filesystem: on NFS, locks and rename mean less.

    A worker holds a flock on its file, which the kernel drops when the process dies, however it dies:
    watchers notice within 0.1 s. It also touches the file each `ttl_s` / 3; one that stopped doing so
    (SIGSTOP, a blocked event loop) is left out after `ttl_s`, until it goes on. What counts is the lock and
    not the name: a folder that was deleted loses nobody. A child that was forked while registered holds the
    lock as well: then only `ttl_s` helps.
    """

    def __init__(self, folder: Path, *, ttl_s: float = 10.0) -> None:
        self._folder = folder
        self._ttl_s = ttl_s

    @asynccontextmanager
    async def register(self, info: WorkerInfo) -> AsyncGenerator[None, None]:
        """As in `Discovery`. Raises OSError if the folder cannot be written, UnsafeFolder if others can."""
        registration = _Registration(self._folder, info)
        registration.write()
        keeper = asyncio.create_task(self._keep(registration))
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            registration.withdraw()

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        """As in `Discovery`. Looks 20 times a second; raises UnsafeFolder if others can write there."""
        make_private(self._folder)
        log.info("registry=files folder=%s", self._folder)
        view = _View(self._folder, self._ttl_s)
        shown: tuple[WorkerInfo, ...] | None = None
        try:
            while True:
                snapshot = view.look()
                if snapshot != shown:
                    shown = snapshot
                    yield snapshot
                await asyncio.sleep(_POLL_S)  # files tell nobody that they changed
        finally:
            view.close()

    async def close(self) -> None:
        """As in `Discovery`. There is nothing to let go of."""

    async def _keep(self, registration: "_Registration") -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)  # until the file wants renewing
            try:
                registration.renew()
            except OSError as error:
                log.warning("registry=away kind=files error=%s", error)


class _Registration:
    """One worker's file, and the lock on it."""

    def __init__(self, folder: Path, info: WorkerInfo) -> None:
        self._folder = folder
        self._path = folder / f"{quote(info.worker_id, safe=':')}{_SUFFIX}"
        self._value = msgspec.json.encode(info)
        self._fd = -1

    def write(self) -> None:
        """Make the file, locked before it can be seen; whoever had the name loses it."""
        make_private(self._folder)
        unfinished = self._path.with_suffix(f".{os.getpid()}{_UNFINISHED}")
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(fd, self._value)
            unfinished.replace(self._path)
        except OSError:
            os.close(fd)
            unfinished.unlink(missing_ok=True)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd

    def renew(self) -> None:
        """Touch the file; write it again if its name is gone."""
        os.utime(self._fd)
        if not self._path.exists():
            self.write()
            log.info("registration=written file=%s", self._path)

    def withdraw(self) -> None:
        """Remove the file, unless another registration has taken the name."""
        if _inode(self._path) == os.fstat(self._fd).st_ino:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)


class _Seen:
    """A file that a watcher holds open: while it does, no other file has its inode."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        regular = stat.S_ISREG(status.st_mode)
        self.inode = status.st_ino
        self.info = decode_worker(os.read(self._fd, MAX_WORKER_BYTES + 1), str(path)) if regular else None
        self._mtime_ns = status.st_mtime_ns
        # Clocks may be set: only the age at first sight is told by the wall clock.
        self._touched_s = time.monotonic() - max(0.0, time.time() - status.st_mtime)

    def is_dead(self) -> bool:
        """Whether nobody holds the lock: the process is gone, or it has withdrawn."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # held; or the kernel cannot tell
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def age_s(self) -> float:
        """Time since the owner last touched the file."""
        mtime_ns = os.fstat(self._fd).st_mtime_ns
        if mtime_ns != self._mtime_ns:
            self._mtime_ns, self._touched_s = mtime_ns, time.monotonic()
        return time.monotonic() - self._touched_s

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


class _View:
    """What one watcher knows about the folder."""

    def __init__(self, folder: Path, ttl_s: float) -> None:
        self._folder = folder
        self._ttl_s = ttl_s
        self._seen: dict[str, _Seen] = {}
        self._away = False

    def look(self) -> tuple[WorkerInfo, ...]:
        """The live workers now, ordered by id."""
        for name, inode in self._names():
            if name not in self._seen or self._seen[name].inode != inode:
                self._open(name)
        for name in [name for name, seen in self._seen.items() if self._gone(name, seen)]:
            self._seen.pop(name).close()
        live = [s.info for s in self._seen.values() if s.info is not None and s.age_s() < self._ttl_s]
        return tuple(sorted(live, key=lambda info: info.worker_id))

    def close(self) -> None:
        """Let go of all files."""
        for seen in self._seen.values():
            seen.close()
        self._seen.clear()

    def _names(self) -> list[tuple[str, int]]:
        """The files that are there; nothing if they cannot be listed: whoever is known stays known."""
        names: list[tuple[str, int]] = []
        try:
            with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
                names = [(entry.name, entry.inode()) for entry in entries if entry.name.endswith(_SUFFIX)]
        except OSError as error:  # out of descriptors, likely
            if not self._away:
                log.warning("registry=away kind=files error=%s", error)
            self._away = True
            return []
        self._away = False
        return names[:MAX_WORKERS]

    def _open(self, name: str) -> None:
        try:
            seen = _Seen(self._folder / name)
        except OSError:
            return
        if name in self._seen:
            self._seen[name].close()
        self._seen[name] = seen

    def _gone(self, name: str, seen: _Seen) -> bool:
        if seen.info is None:  # not ours: left alone, kept in mind so that it is reported once
            return _inode(self._folder / name) != seen.inode
        if not seen.is_dead():
            return False
        # Its owner died. A new one may take the name right now; then that one writes again.
        path = self._folder / name
        if _inode(path) == seen.inode:
            with suppress(OSError):  # it may be tidied up another time
                path.unlink()
        return True


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None
