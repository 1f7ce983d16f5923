"""Who runs a stored response: a frontend's name, and a lock that lasts as long as its process."""

import contextlib
import fcntl
import secrets
from pathlib import Path
from typing import IO


class Owner:
    """This frontend, among those that share the store at `path` (None: nobody shares it).

    The lock file is there only while the frontend runs responses that outlive their requests; the kernel
    lets go of the lock when the process dies, however it does.
    """

    def __init__(self, path: str | None) -> None:
        self.name = secrets.token_hex(8)
        self._path = path
        self._lock: IO[bytes] | None = None

    def claim(self) -> None:
        """Show from now on that this frontend lives. Raises OSError if it cannot."""
        if self._path is None or self._lock is not None:
            return
        lock = self._lock_file(self.name).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._lock = lock

    def lives_elsewhere(self, name: str) -> bool:
        """Whether the frontend of that name is another one, and alive."""
        if self._path is None or name == self.name:
            return False
        path = self._lock_file(name)
        try:
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return False

    def close(self) -> None:
        """Take the lock away."""
        if self._lock is not None:
            with contextlib.suppress(FileNotFoundError):
                self._lock_file(self.name).unlink()
            self._lock.close()
            self._lock = None

    def _lock_file(self, name: str) -> Path:
        return Path(f"{self._path}.{name}.lock")
