"""The frontend process that runs a stored response, and the lock file that shows whether it is alive."""

import contextlib
import fcntl
import secrets
from pathlib import Path
from typing import IO


class Owner:
    """This frontend, among those that share the store at `path` (None: not shared).

    The lock file exists from the first background response on, and contains the `address` of this process;
    the kernel releases the lock when the process dies.
    """

    def __init__(self, path: str | None, address: str = "") -> None:
        self.name = secrets.token_hex(8)
        self._address = address
        self._path = path
        self._lock: IO[bytes] | None = None

    def claim(self) -> None:
        """Take the lock that shows that this frontend is alive. Raises OSError."""
        if self._path is None or self._lock is not None:
            return
        lock = self._lock_file(self.name).open("wb", buffering=0)
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(self._address.encode())
        self._lock = lock

    def lives_elsewhere(self, name: str) -> bool:
        """Whether `name` is another frontend that is alive."""
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

    def address_of(self, name: str) -> str:
        """The address of another frontend that is alive, empty if it has none."""
        with contextlib.suppress(FileNotFoundError):
            return self._lock_file(name).read_text()
        return ""

    def close(self) -> None:
        """Release and remove the lock file."""
        if self._lock is not None:
            with contextlib.suppress(FileNotFoundError):
                self._lock_file(self.name).unlink()
            self._lock.close()
            self._lock = None

    def _lock_file(self, name: str) -> Path:
        return Path(f"{self._path}.{name}.lock")
