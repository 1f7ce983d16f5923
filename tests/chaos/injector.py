"""What every injector of a fault does, and how it says that its fault had no effect."""

from typing import Protocol


class NotEffectiveError(Exception):
    """The fault did not do what it is for: whatever the streams did proves nothing."""


class Injector(Protocol):
    """One fault, from `begin` to `end`. It is used once."""

    def begin(self) -> None:
        """Harm the targets."""

    def proof(self) -> str:
        """What shows that they are harmed, just before the end. Raises NotEffectiveError."""

    def end(self) -> None:
        """Repair what does not recover by itself; called whatever happened since `begin`."""


def require(holds: bool, reason: str) -> None:
    """Raise NotEffectiveError with the reason unless the condition holds."""
    if not holds:
        raise NotEffectiveError(reason)
