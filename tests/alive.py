"""Detects leaks: living objects of a type, and running processes; a lack of descriptors."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Newborn:
    """Counts living objects of a type that were created after this counter."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._older = self._all()

    def count(self) -> int:
        """The number of living objects after garbage collection."""
        return len(self.all())

    def all(self) -> list[object]:
        """The living objects after garbage collection."""
        gc.collect()
        return self.uncollected()

    def uncollected(self) -> list[object]:
        """The living objects, and those that only garbage collection would find."""
        return [each for each in self._all() if not any(each is older for older in self._older)]

    def _all(self) -> list[object]:
        return [each for each in gc.get_objects() if type(each) is self._kind]


def is_running(pid: int) -> bool:
    """False once the process has released its files and sockets, even if it was not reaped yet.

    Its command line becomes empty earlier."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
