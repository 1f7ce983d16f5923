"""A chat answer: its choices, and what stands around them in a stream or in one body."""

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET

from baton.errors import BatonError
from baton.messages import GenerateRequest
from frontend.answers import SYSTEM_FINGERPRINT, ChatCompletion, ErrorBody, UsageBody
from frontend.chat.choice import ChatChoice, ChatSink
from frontend.chat.sinks import StreamedMessage, WholeMessage
from frontend.http import sse
from frontend.routing.fleet import ServedModel
from frontend.schema import ChatBody


class ChatAnswer:
    """The answer of one chat body, streamed or whole; an `Answer` of `frontend.http.respond`."""

    def __init__(
        self,
        body: ChatBody,
        served: ServedModel,
        requests: Sequence[GenerateRequest],
        offered_tools: frozenset[str],
        *,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.model = served.name
        self.stream = bool(body.stream)
        self.ignored = ignored
        self.num_prompt_tokens = len(requests[0].token_ids)
        self._id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._metadata = body.metadata
        self._has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._head, self._tail = self._envelope()
        self._streamed = [self._streamed_message(i) for i in range(len(requests))]
        self._whole = [WholeMessage() for _ in requests]
        sinks: Sequence[ChatSink] = self._streamed if self.stream else self._whole
        self.choices = [
            ChatChoice(body, served.tokenizer, request, offered_tools, sink)
            for request, sink in zip(requests, sinks, strict=True)
        ]

    @property
    def repairs(self) -> Mapping[str, int]:
        """Malformed Harmony that was understood, by kind."""
        return sum((choice.repairs for choice in self.choices), Counter[str]())

    def opening(self) -> bytes:
        """The chunk of each choice that says who speaks."""
        return b"".join(message.role() for message in self._streamed)

    def closing(self) -> bytes:
        """The usage, if it was asked for, and the end."""
        if not self._has_usage:
            return sse.DONE
        usage = msgspec.json.encode(self.usage())
        return self._head + b'],"usage":' + usage + b"}\n\n" + sse.DONE

    def failure(self, error: BatonError) -> bytes:
        """The event that ends a stream that has failed."""
        return sse.event(ErrorBody.of(error))

    def body(self) -> ChatCompletion:
        """The whole answer."""
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self.model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=[message.body(i) for i, message in enumerate(self._whole)],
            usage=self.usage(),
            metadata=UNSET if self._metadata is None else self._metadata,
        )

    async def settle(self) -> None:
        """Nothing is kept."""

    def usage(self) -> UsageBody:
        """The counts so far; the prompt, which all choices share, counts once."""
        return UsageBody.of(
            self.num_prompt_tokens,
            sum(choice.received.num_tokens for choice in self.choices),
            num_cached=self.choices[0].received.num_cached_tokens,
            num_reasoning=sum(choice.num_reasoning_tokens for choice in self.choices),
        )

    def _envelope(self) -> tuple[bytes, bytes]:
        """A chunk up to its list of choices, and from the end of that list on."""
        fixed = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        head = b"data: " + msgspec.json.encode(fixed)[:-1] + b',"choices":['
        return head, b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"

    def _streamed_message(self, index: int) -> StreamedMessage:
        return StreamedMessage(self._head + b'{"index":%d,"delta":' % index, self._tail)
