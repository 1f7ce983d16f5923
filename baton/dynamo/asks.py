"""What a worker is asked over Dynamo's request plane."""

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from baton.messages import Reply


class Reader(Protocol):
    """Makes replies of the items of an answer."""

    def take(self, item: Any) -> Iterable[Reply]:
        """Those of one item. Raises the error that it carries."""
        ...

    def end(self) -> Iterable[Reply]:
        """Those that only the end of the stream shows."""
        ...


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One question: its `body`, like JSON or bytes, and who reads the answer; without a `reader`, any item
    will do. The worker may compute `num_prompt_tokens` before it sends anything.
    """

    name: str
    body: Any
    reader: Reader | None
    limit_s: float | None
    num_prompt_tokens: int = 0
    has_handoff: bool = False
    trace_headers: dict[str, str] | None = None
