"""The Messages API's routes: create a message, count tokens."""

from typing import TypeVar

from frontend.http.body import decode, read
from frontend.http.exchange import Exchange, ignored_header
from frontend.http.respond import Serve, generating
from frontend.http.services import Services
from frontend.messages.answer import MessagesAnswer, TokenCount
from frontend.messages.body import Counted, MessagesBody
from frontend.messages.request import Reading
from frontend.metrics import Tally
from frontend.turn.prepare import encode
from frontend.turn.request import Client, TurnRequest
from frontend.turn.seal import Seal

AnyBody = TypeVar("AnyBody", bound=Counted)


class MessagesRoutes:
    """The routes; `seal` signs thinking blocks."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal

    def table(self) -> dict[tuple[str, str], Serve]:
        """The Serve of each (method, path)."""
        return {
            ("POST", "/v1/messages"): generating(self.prepare),
            ("POST", "/v1/messages/count_tokens"): self.count_tokens,
        }

    async def prepare(self, raw: bytes, client: Client, services: Services) -> MessagesAnswer:
        """The answer to a body, ready to be generated. Raises a BatonError if the body is refused."""
        body, unknown, reading, request = await read(raw, lambda raw: self._read(raw, MessagesBody))
        services.check_tools(reading.left_out)
        _, (choice,) = await services.prepare(request, client)
        thinking = body.thinking
        shows = thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"
        return MessagesAnswer(
            body.model,
            choice,
            self._seal,
            max_tokens=body.max_tokens,
            stream=bool(body.stream),
            shows_thinking=shows,
            ignored=(*unknown, *sorted(reading.left_out)),
        )

    async def count_tokens(self, exchange: Exchange, services: Services, tally: Tally) -> None:
        """`POST /v1/messages/count_tokens`."""
        async with services.bodies.read(exchange, services.max_body_bytes) as raw:
            body, unknown, reading, request = await read(raw, lambda raw: self._read(raw, Counted))
        services.check_tools(reading.left_out)
        served = services.fleet.served(body.model)
        tally.model = served.name
        (prompt,) = await encode(request, exchange.owner, served, services.thoughts)
        ignored = (*unknown, *sorted(reading.left_out))
        services.metrics.count_ignored(ignored)
        await exchange.answer(200, TokenCount(input_tokens=len(prompt.token_ids)), ignored_header(ignored))

    def _read(
        self, raw: bytes, body_type: type[AnyBody]
    ) -> tuple[AnyBody, tuple[str, ...], Reading, TurnRequest]:
        body, unknown = decode(raw, body_type)
        reading = Reading(body, self._seal)
        return body, unknown, reading, reading.turn_request(len(raw))
