"""What the requests of one app share."""

import dataclasses
from collections.abc import Callable
from functools import cached_property

from frontend.http.body import Bodies
from frontend.metrics import Metrics, Others
from frontend.record import Trace
from frontend.routing.fleet import Fleet
from frontend.routing.generate import Generator
from frontend.snapshot import Snapshots
from frontend.turn.seal import Seal
from frontend.turn.thoughts import Thoughts

BeginTrace = Callable[[str], Trace]
"""The span of a request with this `traceparent`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Services:
    """One app's dependencies and limits.

    A stream sends headers with its first token, or `first_event_wait_s` after a worker has taken it, so that
    early failures still get an HTTP error status. While it is idle, it sends a comment every `keep_alive_s`.
    With `share_cache`, API keys share cached KV. `seal` signs the reasoning that clients carry. `has_page`:
    the live page is at `/`."""

    fleet: Fleet
    generator: Generator
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    others: Others
    thoughts: Thoughts = dataclasses.field(default_factory=Thoughts)
    seal: Seal = dataclasses.field(default_factory=Seal)
    request_timeout_s: float = 600.0
    bodies: Bodies = dataclasses.field(default_factory=Bodies)
    max_choices: int = 16
    first_event_wait_s: float = 0.1
    keep_alive_s: float = 10.0
    share_cache: bool = False
    begin_trace: BeginTrace | None = None
    has_page: bool = True

    @cached_property
    def snapshots(self) -> Snapshots:
        return Snapshots(self.fleet, self.metrics, self.others)
