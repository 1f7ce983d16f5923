"""What a worker is asked over Dynamo's request plane."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from baton.messages import Reply


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One question: its `body`, like JSON or bytes, and how its answer becomes replies: `take` makes those of
    an item, `end` the rest, and both raise the error that they find. The worker may compute
    `num_prompt_tokens` before it sends anything.
    """

    name: str
    body: Any
    limit_s: float | None
    take: Callable[[Any], Iterable[Reply]] = lambda _: ()
    end: Callable[[], Iterable[Reply]] = tuple
    num_prompt_tokens: int = 0
    has_handoff: bool = False
    trace_headers: dict[str, str] | None = None
