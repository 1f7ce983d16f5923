"""A completion answer: each choice's text as it is decoded, streamed or gathered into one body."""

import secrets
import time
from collections.abc import Mapping, Sequence

import msgspec

from baton.errors import BatonError
from baton.messages import FinishReason, GenerateRequest, TokenChunk
from frontend.answers import (
    SYSTEM_FINGERPRINT,
    Completion,
    CompletionChoiceBody,
    ErrorBody,
    LegacyLogprobs,
    UsageBody,
)
from frontend.http import sse
from frontend.routing.fleet import ServedModel
from frontend.schema import CompletionBody
from frontend.text.detokenize import IncrementalDecoder, StopStrings
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.logprobs import legacy_logprobs
from frontend.turn.received import ReceivedTokens

_encode = msgspec.json.Encoder().encode


class CompletionChoice:
    """A `Choice` of `frontend.http.respond`: text without its stop string or stop token."""

    def __init__(
        self,
        body: CompletionBody,
        tokenizer: ModelTokenizer,
        request: GenerateRequest,
        head: bytes,
        tail: bytes,
    ) -> None:
        self.request = request
        self.received = ReceivedTokens(request.sampling, request.sampling.stop_token_ids)
        self.stopped = False
        self._streamed = bool(body.stream)
        self._tokenizer = tokenizer
        self._head = head
        self._tail = tail
        self._special_bytes: dict[int, bytes] = {}
        if body.skip_special_tokens is False:
            self._special_bytes = {i: token.value.encode() for token, i in tokenizer.special_ids.items()}
        self._decoder = IncrementalDecoder()
        self._stops = StopStrings([body.stop] if isinstance(body.stop, str) else body.stop or ())
        self._num_logprobs_given = 0
        self._text: list[str] = []
        self._num_chars = 0

    def feed(self, chunk: TokenChunk) -> bytes:
        """The event of a chunk's text."""
        token_ids = self.received.take(chunk)
        data = b"".join([self._special_bytes.get(i) or self._tokenizer.token_bytes(i) for i in token_ids])
        text, self.stopped = self._stops.push(self._decoder.push(data))
        return self._event(text) if text else b""

    def finish(self) -> bytes:
        """The event of what was held back, with the finish reason."""
        rest = ""
        if not self.stopped:
            text, self.stopped = self._stops.push(self._decoder.flush())
            rest = text + self._stops.flush()
        return self._event(rest, b'"%b"' % self._finish_reason.encode())

    def body(self, index: int) -> CompletionChoiceBody:
        """The whole choice."""
        entries = self.received.logprobs
        return CompletionChoiceBody(
            index=index,
            text="".join(self._text),
            finish_reason=self._finish_reason,
            logprobs=None if entries is None else legacy_logprobs(entries, self._tokenizer, 0),
        )

    @property
    def _finish_reason(self) -> FinishReason:
        return "stop" if self.stopped else self.received.finish_reason

    def _event(self, text: str, finish: bytes = b"null") -> bytes:
        self._text.append(text)
        if not self._streamed:
            return b""
        logprobs = _encode(self._new_logprobs())
        self._num_chars += len(text)
        return b"".join(
            (
                self._head,
                _encode(text),
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                finish,
                b"}",
                self._tail,
            )
        )

    def _new_logprobs(self) -> LegacyLogprobs | None:
        if self.received.logprobs is None:
            return None
        entries = self.received.logprobs[self._num_logprobs_given :]
        self._num_logprobs_given += len(entries)
        return legacy_logprobs(entries, self._tokenizer, self._num_chars)


class CompletionAnswer:
    """The answer of one completion body; an `Answer` of `frontend.http.respond`."""

    def __init__(
        self,
        body: CompletionBody,
        served: ServedModel,
        requests: Sequence[GenerateRequest],
        *,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.model = served.name
        self.stream = bool(body.stream)
        self.ignored = ignored
        self.repairs: Mapping[str, int] = {}
        # The choices of one prompt share it.
        self.num_prompt_tokens = sum(len(r.token_ids) for r in requests if r.sampling.choice == 0)
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._head = self._chunk_head()
        tail = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"
        self.choices = [
            CompletionChoice(body, served.tokenizer, request, self._head + b'{"index":%d,"text":' % i, tail)
            for i, request in enumerate(requests)
        ]

    def opening(self) -> bytes:
        """Nothing: the first text opens the stream."""
        return b""

    def closing(self) -> bytes:
        """The usage, if it was asked for, and the end."""
        if not self._has_usage:
            return sse.DONE
        return self._head + b'],"usage":' + _encode(self.usage()) + b"}\n\n" + sse.DONE

    def failure(self, error: BatonError) -> bytes:
        """The event that ends a stream that has failed."""
        return sse.event(ErrorBody.of(error))

    def body(self) -> Completion:
        """The whole answer."""
        return Completion(
            id=self._id,
            created=self._created,
            model=self.model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=[choice.body(i) for i, choice in enumerate(self.choices)],
            usage=self.usage(),
        )

    async def settle(self) -> None:
        """Nothing is kept."""

    def usage(self) -> UsageBody:
        """The counts so far."""
        firsts = (choice for choice in self.choices if choice.request.sampling.choice == 0)
        return UsageBody.of(
            self.num_prompt_tokens,
            sum(choice.received.num_tokens for choice in self.choices),
            num_cached=sum(choice.received.num_cached_tokens for choice in firsts),
        )

    def _chunk_head(self) -> bytes:
        fixed = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        return b"data: " + _encode(fixed)[:-1] + b',"choices":['
