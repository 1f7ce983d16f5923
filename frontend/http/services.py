"""The HTTP layer's dependencies: protocols of the fleet and the generator, and an app's limits."""

import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

from baton.messages import GenerateRequest, TokenChunk, WorkerInfo, WorkerStats
from frontend.http.bodies import Bodies
from frontend.metrics import Metrics, Sampled
from frontend.routing.health import Health
from frontend.text.served import ServedModel
from frontend.turn.choice import Choice
from frontend.turn.prepare import prepare
from frontend.turn.request import Client, TurnRequest
from frontend.turn.thoughts import Thoughts


class FleetView(Protocol):
    """The live workers as the HTTP layer sees them; implemented by `frontend.routing.fleet.Fleet`."""

    def models(self) -> list[str]:
        """Names of the models that are available now."""
        ...

    def served(self, model: str) -> ServedModel:
        """The model of that name. Raises ModelNotFound or NoWorkers."""
        ...

    def health(self) -> Health:
        """The body of /health."""
        ...

    async def stats(self) -> list[tuple[WorkerInfo, WorkerStats]]:
        """The statistics of every worker that answers in time."""
        ...


class TokenSource(Protocol):
    """Answers token requests; implemented by `frontend.routing.generate.Generator`."""

    def check(self, model: str, caller: str, deadline_s: float) -> None:
        """Raises Overloaded if a request of this caller would be refused now."""
        ...

    def generate(
        self, request: GenerateRequest, caller: str, on_taken: Callable[[], None]
    ) -> AsyncGenerator[TokenChunk, None]:
        """The answer's chunks; closing the generator cancels the work. `on_taken` is called once, when the
        request has gone to a worker. Raises BatonErrors.
        """
        ...


OtherMetrics = Callable[[], Awaitable[Sequence[Sequence[Sampled]]]]
"""The metrics of the frontend's other processes."""


async def _no_other_metrics() -> Sequence[Sequence[Sampled]]:
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Services:
    """One app's dependencies and limits.

    A stream sends headers with its first token, or `first_event_wait_s` after a worker has taken it, so that
    early failures still get an HTTP error status. While it is idle, it sends a comment every `keep_alive_s`.
    With `share_cache`, API keys share cached KV.
    """

    fleet: FleetView
    generator: TokenSource
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    other_metrics: OtherMetrics = _no_other_metrics
    thoughts: Thoughts = dataclasses.field(default_factory=Thoughts)
    request_timeout_s: float = 600.0
    max_body_bytes: int = 16 << 20
    bodies: Bodies = dataclasses.field(default_factory=Bodies)
    max_choices: int = 16
    first_event_wait_s: float = 0.1
    keep_alive_s: float = 10.0
    share_cache: bool = False

    async def prepare(self, request: TurnRequest, client: Client) -> tuple[ServedModel, list[Choice]]:
        """The model and the choices, ready to be generated. Raises BatonErrors, as `prepare` does."""
        served = self.fleet.served(request.model)
        check = self.generator.check
        return served, await prepare(
            request, client, served, self.thoughts, check, max_choices=self.max_choices
        )
