"""What the HTTP side needs of the rest of the frontend: seams, and the settings of one app."""

import dataclasses
from collections.abc import AsyncGenerator, Iterable
from typing import Protocol

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, TokenChunk, WorkerInfo, WorkerStats
from frontend.metrics import Metrics
from frontend.routing.health import Health
from frontend.text.served import ServedModel
from frontend.turn.thoughts import Thoughts


class FleetView(Protocol):
    """The live workers, as far as HTTP shows them; `frontend.routing.fleet.Fleet` is the real one."""

    def models(self) -> list[str]:
        """Names that can be asked for now."""
        ...

    def served(self, model: str) -> ServedModel:
        """Raises ModelNotFound or NoWorkers."""
        ...

    def health(self) -> Health:
        """The body of /health."""
        ...

    async def stats(self) -> list[tuple[WorkerInfo, WorkerStats]]:
        """The figures of every worker that answers in time."""
        ...


class TokenSource(Protocol):
    """Answers token requests; `frontend.routing.generate.Generator` is the real one."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """The answer's chunks; closing the generator cancels the work. Raises BatonErrors."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Services:
    """One app's collaborators and limits.

    `first_event_wait_s` is how long a stream waits for its first token, so that what fails at once is still
    an HTTP status; after that the headers go out with a comment, then one more every `keep_alive_s` while
    nothing else does. `strict_tools` refuses tools that cannot run here instead of leaving them out.
    """

    fleet: FleetView
    generator: TokenSource
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    thoughts: Thoughts = dataclasses.field(default_factory=Thoughts)
    request_timeout_s: float = 600.0
    max_body_bytes: int = 16 << 20
    max_choices: int = 16
    first_event_wait_s: float = 0.1
    keep_alive_s: float = 10.0
    strict_tools: bool = False

    def check_tools(self, left_out: Iterable[str]) -> None:
        """Raises InvalidRequest for tools among what was left out, if `strict_tools` refuses these."""
        kinds = sorted(path.removeprefix("tools[].") for path in left_out if path.startswith("tools[]."))
        if kinds and self.strict_tools:
            raise InvalidRequest(
                f"`tools` has a {kinds[0]!r} tool, which only its vendor's servers can run; this server "
                "refuses such tools (--strict-tools).",
                param="tools",
            )
