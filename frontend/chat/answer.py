"""A chat completion: from the body to the answer, streamed or whole."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from baton.errors import BatonError
from baton.messages import TokenChunk
from frontend.chat.body import ChatBody
from frontend.chat.message import ChatCompletion, MessageWriter
from frontend.chat.request import gives_reasoning, not_enforced, turn_request
from frontend.http import sse
from frontend.http.answer import Answer
from frontend.http.body import decode, read
from frontend.http.errors import ErrorBody
from frontend.http.services import Services
from frontend.text.served import ServedModel
from frontend.turn.choice import Choice
from frontend.turn.chunks import SYSTEM_FINGERPRINT, Envelope, UsageBody
from frontend.turn.prepare import prepare
from frontend.turn.request import Client, TurnRequest


async def prepare_chat(raw: bytes, client: Client, services: Services) -> "ChatAnswer":
    """The answer to a body, ready to be generated. Raises a BatonError if the body is refused."""
    body, unknown, request = await read(raw, _read)
    served = services.fleet.served(body.model)
    choices = await prepare(
        request, client, served, services.thoughts, services.generator.check, max_choices=services.max_choices
    )
    return ChatAnswer(body, served, choices, ignored=(*unknown, *not_enforced(body)))


def _read(raw: bytes) -> tuple[ChatBody, tuple[str, ...], TurnRequest]:
    body, unknown = decode(raw, ChatBody)
    return body, unknown, turn_request(body, len(raw))


class ChatAnswer(Answer):
    """The answer to one chat body."""

    def __init__(
        self, body: ChatBody, served: ServedModel, choices: Sequence[Choice], *, ignored: tuple[str, ...] = ()
    ) -> None:
        self.model = served.name
        self.stream = bool(body.stream)
        self.ignored = ignored
        self.choices = choices
        self._metadata = body.metadata
        self._envelope = Envelope(
            "chat.completion.chunk", "chatcmpl", served.name, has_usage=body.gives_usage
        )
        text_tools = frozenset(tool.custom.name for tool in body.tools or () if tool.custom is not None)
        self._messages = [
            MessageWriter(
                index,
                choice,
                served.tokenizer,
                self._envelope if self.stream else None,
                gives_reasoning=gives_reasoning(body),
                text_tools=text_tools,
            )
            for index, choice in enumerate(choices)
        ]

    def opening(self) -> bytes:
        """The first chunk of each choice, with the role."""
        return b"".join(message.role() for message in self._messages)

    def feed(self, index: int, chunk: TokenChunk) -> bytes:
        """The events of a chunk."""
        return self._messages[index].write(self.choices[index].feed(chunk))

    def finish(self, index: int) -> bytes:
        """The choice's last events."""
        message = self._messages[index]
        return message.write(self.choices[index].finish()) + message.end()

    def closing(self) -> bytes:
        """The usage, if requested, and the end of the stream."""
        return self._envelope.closing(self.choices)

    def failure(self, error: BatonError) -> bytes:
        """The event that ends a failed stream."""
        return sse.event(ErrorBody.of(error))

    def body(self) -> msgspec.Struct:
        """The whole answer."""
        return ChatCompletion(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self.model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=[message.body() for message in self._messages],
            usage=UsageBody.of(self.choices),
            metadata=UNSET if self._metadata is None else self._metadata,
        )
