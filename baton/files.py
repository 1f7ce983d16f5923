"""Discovery on one machine: a folder with one locked file per worker, which no other user can change."""

import asyncio
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from baton.discovery import MAX_WORKER_BYTES, MAX_WORKERS, decode_worker, kept
from baton.messages import WorkerInfo

log = logging.getLogger(__name__)

_POLL_S = 0.05
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_RETRY_S = 1.0
_SUFFIX = ".json"
_ADVICE = (
    "Set --file-registry (BATON_FILE_REGISTRY) to a folder that you own, inside a folder that only you or "
    "root can write to."
)


class UnsafeFolder(PermissionError):
    """Another user could change the registry and have prompts sent to an address of theirs."""


def default_registry(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_RUNTIME_DIR/baton/registry` if that is this user's, else a folder in the user's home."""
    runtime = Path(environ.get("XDG_RUNTIME_DIR", ""))
    # It may be unset, deleted at logout, or another user's, as `su` keeps the variable.
    if runtime.is_absolute() and runtime.is_dir() and runtime.stat().st_uid == os.getuid():
        return runtime / "baton" / "registry"
    try:
        home = Path.home()
    except RuntimeError:
        raise UnsafeFolder(f"This user has no home folder for the file registry. {_ADVICE}") from None
    return home / ".local" / "state" / "baton" / "registry"


def make_private(folder: Path) -> None:
    """Create the folder with mode 0700 if missing. Raises UnsafeFolder if others could write to it, or to the
    folder that it is in. Folders further up are not checked: a watcher takes only files of this user.
    """
    folder = folder.absolute()
    try:
        for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
            missing.mkdir(0o700, exist_ok=True)
        own, parent = folder.stat(), folder.resolve().parent.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise UnsafeFolder(f"The registry {folder} cannot be created: {error}. {_ADVICE}") from error
    if not stat.S_ISDIR(own.st_mode):
        raise UnsafeFolder(f"The registry {folder} is not a folder. {_ADVICE}")
    if own.st_uid != os.getuid() or own.st_mode & 0o022:
        raise UnsafeFolder(f"Others can write to the registry {folder}: own it and set mode 0700. {_ADVICE}")
    # In a sticky folder such as /tmp others can add files, but not replace ours or root's.
    is_shared = parent.st_mode & 0o002 and not parent.st_mode & stat.S_ISVTX
    if is_shared or parent.st_uid not in (0, os.getuid()):
        raise UnsafeFolder(f"Others can write to {folder.parent} and replace the registry. {_ADVICE}")


class FilesDiscovery:
    """`Discovery` in a folder on a local filesystem; NFS gives weaker guarantees for locks and rename.

    A worker holds a flock on its file. The kernel drops it when the process dies, which watchers notice
    within 0.1 s. The worker also touches the file every `ttl_s` / 3; if it stops (SIGSTOP, a blocked event
    loop), it is hidden after `ttl_s` until it continues. The lock counts, not the name, so a deleted folder
    loses no worker. A child forked while registered holds the lock too; then only `ttl_s` detects its
    parent's death.
    """

    def __init__(self, folder: Path, *, ttl_s: float = 10.0) -> None:
        self._folder = folder
        self._ttl_s = ttl_s

    @asynccontextmanager
    async def register(self, info: WorkerInfo) -> AsyncGenerator[None, None]:
        """See `Discovery`. Waits while the disk is full. Raises OSError if the folder is not writable,
        UnsafeFolder if others can write to it.
        """
        registration = _Registration(self._folder, info)
        try:
            async with kept(registration.hold, every_s=self._ttl_s / 3, retry_s=_FULL_RETRY_S):
                yield
        finally:
            registration.withdraw()

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        """See `Discovery`. Polls 20 times a second; raises UnsafeFolder if others can write to the folder."""
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
                await asyncio.sleep(_POLL_S)  # poll: files do not notify
        finally:
            view.close()

    async def close(self) -> None:
        """See `Discovery`. Does nothing."""


class _Registration:
    """One worker's file, and the lock on it."""

    def __init__(self, folder: Path, info: WorkerInfo) -> None:
        self._folder = folder
        self._path = folder / f"{quote(info.worker_id, safe=':')}{_SUFFIX}"
        self._value = msgspec.json.encode(info)
        self._fd = -1

    async def hold(self) -> bool:
        """Touch the file; write it if it is new, or its name is gone. False if it cannot be written now."""
        if self._fd < 0:
            return self._write()
        try:
            os.utime(self._fd)
            if not self._path.exists() and self._write():
                log.info("registration=written file=%s", self._path)
        except OSError as error:
            log.warning("registry=unreachable kind=files error=%s", error)
            return False
        return True

    def _write(self) -> bool:
        """Create the file, locked before it becomes visible; replaces an earlier owner of the name. False if
        the disk is full.
        """
        make_private(self._folder)
        unfinished = self._path.with_suffix(f".{os.getpid()}.tmp")
        fd = -1
        try:
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            value = self._value
            while value:  # a full disk may take a part
                value = value[os.write(fd, value) :]
            unfinished.replace(self._path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                unfinished.unlink(missing_ok=True)
            if error.errno not in _FULL:
                raise
            log.warning("registry=full kind=files error=%s", error)
            return False
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        return True

    def withdraw(self) -> None:
        """Remove the file, if it was written, unless another registration has taken the name."""
        if self._fd >= 0:
            if _inode(self._path) == os.fstat(self._fd).st_ino:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)


class _Seen:
    """A file that a watcher keeps open, so that its inode is not reused."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        self.inode = status.st_ino
        # Another user's file has no place here, wherever this folder is.
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        self.info = decode_worker(os.read(self._fd, MAX_WORKER_BYTES + 1), str(path)) if is_own else None
        self._mtime_ns = status.st_mtime_ns
        # Clocks can be changed: use the wall clock only for the age at first sight.
        self._touched_s = time.monotonic() - max(0.0, time.time() - status.st_mtime)

    def is_dead(self) -> bool:
        """Whether the lock is free: the process ended, or it withdrew."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # locked, or the kernel cannot tell
            return False
        return True  # closing the file releases the lock

    def age_s(self) -> float:
        """Time since the owner last touched the file."""
        mtime_ns = os.fstat(self._fd).st_mtime_ns
        if mtime_ns != self._mtime_ns:
            self._mtime_ns, self._touched_s = mtime_ns, time.monotonic()
        return time.monotonic() - self._touched_s

    def close(self) -> None:
        os.close(self._fd)


class _View:
    """One watcher's view of the folder."""

    def __init__(self, folder: Path, ttl_s: float) -> None:
        self._folder = folder
        self._ttl_s = ttl_s
        self._seen: dict[str, _Seen] = {}
        self._away = False

    def look(self) -> tuple[WorkerInfo, ...]:
        """The live workers, ordered by id."""
        for name, inode in self._names():
            known = self._seen.get(name)
            if known is None or known.inode != inode:
                with suppress(OSError):  # it is gone again, or there are no descriptors
                    self._seen[name] = _Seen(self._folder / name)
                    if known is not None:
                        known.close()
        for name in [name for name, seen in self._seen.items() if self._gone(name, seen)]:
            self._seen.pop(name).close()
        live = [s.info for s in self._seen.values() if s.info is not None and s.age_s() < self._ttl_s]
        return tuple(sorted(live, key=lambda info: info.worker_id))

    def close(self) -> None:
        for seen in self._seen.values():
            seen.close()
        self._seen.clear()

    def _names(self) -> list[tuple[str, int]]:
        """The files in the folder; empty if it cannot be listed, so that known workers stay known."""
        try:
            with os.scandir(self._folder) as entries:
                found = [(entry.name, entry.inode()) for entry in entries if entry.name.endswith(_SUFFIX)]
        except OSError as error:
            was_away, self._away = self._away, not isinstance(error, FileNotFoundError)
            if self._away and not was_away:  # probably out of descriptors
                log.warning("registry=unreachable kind=files error=%s", error)
            return []
        self._away = False
        return found[:MAX_WORKERS]

    def _gone(self, name: str, seen: _Seen) -> bool:
        if seen.info is None:  # not a registration: kept, so that it is reported only once
            return _inode(self._folder / name) != seen.inode
        if not seen.is_dead():
            return False
        # Its owner died. If a new worker takes the name now, it writes the file again.
        path = self._folder / name
        if _inode(path) == seen.inode:
            with suppress(OSError):  # can be deleted another time
                path.unlink()
        return True


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None
