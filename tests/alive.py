"""What is left alive: objects of a type, and processes."""

import gc
from pathlib import Path


class Newborn:
    """Counts objects of a type that did not exist when this was made; other tests may have left some."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._older = self._all()

    def count(self) -> int:
        """How many are alive once the garbage is collected."""
        gc.collect()
        return sum(not any(each is older for older in self._older) for each in self._all())

    def _all(self) -> list[object]:
        return [each for each in gc.get_objects() if type(each) is self._kind]


def is_running(pid: int) -> bool:
    """False once the process has let go of its files and sockets, though its parent may not know yet.

    Its command line is empty earlier than that.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
