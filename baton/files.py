"""Discovery on one machine: a folder with one locked file per worker, which no other user can change."""

import asyncio
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

import msgspec

from baton.discovery import MAX_WORKER_BYTES, MAX_WORKERS, decode_worker, kept
from baton.messages import WorkerInfo

log = logging.getLogger(__name__)

_POLL_S = 0.05
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_FULL_RETRY_S = 1.0
_SUFFIX = ".json"
_ADVICE = (
    "Set --file-registry (BATON_FILE_REGISTRY) to a folder that you own, inside a folder that only you or "
    "root can write to."
)


class UnsafeFolder(PermissionError):
    """Another user could change the registry and have prompts sent to an address of theirs."""


def default_registry() -> Path:
    """`$XDG_RUNTIME_DIR/baton/registry` if that is this user's, else a folder in the user's home."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
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
    folder that it is in. Folders further up are not checked: a watcher takes only files of this user."""
    folder = folder.absolute()
    try:
        for missing in reversed([parent for parent in folder.parents if not parent.exists()]):
            missing.mkdir(0o700, exist_ok=True)
        folder.mkdir(0o700, exist_ok=True)
        own, parent = folder.stat(), folder.resolve().parent.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise UnsafeFolder(f"The registry {folder} cannot be created: {error}. {_ADVICE}") from error
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
    loop), it is hidden after `ttl_s` until it continues. The file's time is the machine's monotonic clock,
    since the wall clock can be changed. A child forked while registered holds the lock too; then only `ttl_s`
    detects its parent's death."""

    def __init__(self, folder: Path, *, ttl_s: float = 10.0) -> None:
        self._folder = folder
        self._ttl_s = ttl_s
        self._decoded = lru_cache(MAX_WORKERS)(decode_worker)  # an invalid file is reported once
        self.problem = ""

    @asynccontextmanager
    async def register(self, info: WorkerInfo) -> AsyncGenerator[None, None]:
        """See `Discovery`. Waits while the disk is full. Raises OSError if the folder is not writable,
        UnsafeFolder if others can write to it."""
        path = self._folder / f"{quote(info.worker_id, safe=':')}{_SUFFIX}"
        value, fd = msgspec.json.encode(info), -1

        async def hold() -> bool:
            """Touch the file; write it if it is new, or its name is gone. False if that fails for now."""
            nonlocal fd
            try:
                if fd < 0 or not path.exists():
                    before, fd = fd, _write(path, value)
                    log.info("registration=written file=%s", path)
                    if before >= 0:
                        os.close(before)
                else:
                    _touch(fd)
            except OSError as error:
                if fd < 0 and error.errno not in _FULL:
                    raise
                log.warning("registration=not_written kind=files error=%s", error)
                return False
            return True

        try:
            async with kept(hold, every_s=self._ttl_s / 3, retry_s=_FULL_RETRY_S):
                yield
        finally:
            if fd >= 0:  # written, and perhaps replaced by another registration
                _remove(path, os.fstat(fd))
                os.close(fd)

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        """See `Discovery`. Polls 20 times a second; raises UnsafeFolder if others can write to the folder."""
        make_private(self._folder)
        log.info("registry=files folder=%s", self._folder)
        shown: tuple[WorkerInfo, ...] | None = None
        while True:
            try:
                snapshot, self.problem = self.look(), ""
            except OSError as error:  # the folder was deleted, or there are no descriptors
                if self.problem != str(error):
                    self.problem = str(error)
                    log.warning("registry=unreachable kind=files error=%s", error)
            else:
                if snapshot != shown:
                    shown = snapshot
                    yield snapshot
            await asyncio.sleep(_POLL_S)  # poll: files do not notify

    async def close(self) -> None:
        """See `Discovery`. Does nothing."""

    def look(self) -> tuple[WorkerInfo, ...]:
        """The live workers, ordered by id. Raises OSError if the folder or its files cannot be opened now."""
        paths = [self._folder / name for name in os.listdir(self._folder) if name.endswith(_SUFFIX)]
        found = map(self._read, paths[:MAX_WORKERS])
        return tuple(sorted((info for info in found if info), key=lambda info: info.worker_id))

    def _read(self, path: Path) -> WorkerInfo | None:
        """The worker that holds this file, if it lives; the file of a dead one is removed."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                raise
            return None  # it is gone again, or not ours
        try:
            status = os.fstat(fd)
            # Another user's file has no place here, wherever this folder is.
            is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
            info = self._decoded(os.read(fd, MAX_WORKER_BYTES + 1), str(path)) if is_own else None
            if info is not None and _is_free(fd):  # the process ended, or it withdrew
                _remove(path, status)
                return None
            age_s = (time.monotonic_ns() - status.st_mtime_ns) / 1e9
            return info if age_s < self._ttl_s else None
        finally:
            os.close(fd)


def _write(path: Path, value: bytes) -> int:
    """Create the file, locked before it becomes visible; replaces an earlier owner of the name."""
    make_private(path.parent)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        while value:  # a full disk may take a part
            value = value[os.write(fd, value) :]
        _touch(fd)
        unfinished.replace(path)
    except OSError:
        os.close(fd)
        unfinished.unlink(missing_ok=True)
        raise
    return fd


def _touch(fd: int) -> None:
    now_ns = time.monotonic_ns()
    os.utime(fd, ns=(now_ns, now_ns))


def _is_free(fd: int) -> bool:
    """Whether nobody holds the lock, which closing the file releases."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # locked, or the kernel cannot tell
        return False
    return True


def _remove(path: Path, status: os.stat_result) -> None:
    """Unless another registration has taken the name."""
    with suppress(OSError):  # can be removed another time
        if path.lstat().st_ino == status.st_ino:
            path.unlink()
