"""A raw completion: from the body to the answer, streamed or whole."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, cast

import msgspec

from baton.errors import BatonError, InvalidRequest
from baton.messages import FinishReason, TokenChunk
from frontend.harmony.conversation import TextDelta
from frontend.http import sse
from frontend.http.answer import Answer
from frontend.http.body import decode, read
from frontend.http.errors import ErrorBody
from frontend.http.services import Services
from frontend.text.served import ServedModel
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.choice import Choice
from frontend.turn.chunks import SYSTEM_FINGERPRINT, Envelope, UsageBody
from frontend.turn.fields import CommonFields, Count, Refused, StopText, TokenId
from frontend.turn.logprobs import LegacyLogprobs, echoed_logprobs, legacy_logprobs
from frontend.turn.prepare import prepare
from frontend.turn.raw_text import text_of
from frontend.turn.request import Client, Limits, RawPrompts, TurnRequest


class CompletionChoiceBody(msgspec.Struct, kw_only=True):
    """One of the `n` answers; `finish_reason` is null in all but the last chunk of a stream."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: LegacyLogprobs | None = None


class Completion(msgspec.Struct, kw_only=True):
    """The response of `POST /v1/completions`."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoiceBody]
    usage: UsageBody
    system_fingerprint: str
    object: Literal["text_completion"] = "text_completion"


# Evaluation harnesses send more than OpenAI's four.
MAX_STOPS = 32


class CompletionBody(CommonFields, kw_only=True):
    """`POST /v1/completions`: raw text or token ids; an array of either gives `n` choices for each.

    Control tokens spelled out in a text prompt are encoded as such; those of the answer are left out of its
    text unless `skip_special_tokens` is false. `max_tokens` defaults to 16. `echo` puts the prompt before
    the answer; with `logprobs` it includes the prompt's log probabilities and needs `max_tokens` 0 or 1.
    """

    refused: ClassVar[Refused] = {
        **CommonFields.refused,
        "suffix": (("",), "This model cannot insert text before a suffix."),
        "best_of": ((1,), "Use `n` and rank the choices yourself."),
    }
    deep: ClassVar[frozenset[str]] = frozenset({"nvext", "stream_options", "structured_outputs"})

    prompt: str | list[str | TokenId | list[TokenId]]
    n: Count | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    echo: bool | None = None
    skip_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("`max_tokens` 0 needs `echo`: true.", param="max_tokens")
        if self.echo and self.logprobs is not None:
            if self.max_tokens not in {0, 1}:
                raise InvalidRequest("`echo` with `logprobs` needs `max_tokens` 0 or 1.", param="max_tokens")
            if self.stream:
                raise InvalidRequest("`echo` with `logprobs` cannot be streamed.", param="stream")


DEFAULT_MAX_TOKENS = 16

_encode = msgspec.json.Encoder().encode


async def prepare_completion(raw: bytes, client: Client, services: Services) -> "CompletionAnswer":
    """The answer to a body, ready to be generated. Raises a BatonError if the body is refused."""
    body, unknown, request = await read(raw, _read)
    served = services.fleet.served(body.model)
    choices = await prepare(
        request, client, served, services.thoughts, services.generator.check, max_choices=services.max_choices
    )
    return CompletionAnswer(body, served, choices, ignored=unknown)


def _read(raw: bytes) -> tuple[CompletionBody, tuple[str, ...], TurnRequest]:
    body, unknown = decode(raw, CompletionBody)
    return body, unknown, turn_request(body, len(raw))


def turn_request(body: CompletionBody, num_bytes: int) -> TurnRequest:
    """The request of a body of `num_bytes`. Raises InvalidRequest for fields that contradict each other."""
    prompts = RawPrompts(tuple(prompts_of(body)), shows_special=body.skip_special_tokens is False)
    limits = Limits(
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1),
        num_choices=body.n or 1,
        stop=body.stop,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return TurnRequest.of(body, prompts, limits, path="prompt", num_bytes=num_bytes)


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts, each text or token ids. Raises InvalidRequest for empty prompts and mixed lists."""
    prompt = body.prompt
    prompts: list[str | list[int]] = []
    if isinstance(prompt, str):
        prompts = [prompt]
    elif set(map(type, prompt)) <= {int}:  # quick, as token ids may be many
        prompts = [cast("list[int]", prompt)]
    else:
        prompts = [item for item in prompt if not isinstance(item, int)]
        if len(prompts) != len(prompt):
            raise InvalidRequest(
                "`prompt` mixes token ids and strings; wrap each prompt's ids in an array.", param="prompt"
            )
    if not prompts or not all(prompts):
        raise InvalidRequest("`prompt` must not be empty.", param="prompt")
    return prompts


class CompletionAnswer(Answer):
    """The answer to one completion body."""

    def __init__(
        self,
        body: CompletionBody,
        served: ServedModel,
        choices: Sequence[Choice],
        *,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.model = served.name
        self.stream = bool(body.stream)
        self.ignored = ignored
        self.choices = choices
        self._envelope = Envelope("text_completion", "cmpl", served.name, has_usage=body.gives_usage)
        self._texts = [TextWriter(choice, served.tokenizer, body) for choice in choices]

    def opening(self) -> bytes:
        """The echoed prompts, if requested."""
        return b"".join(self._chunk_of(i, text.echo) for i, text in enumerate(self._texts) if text.echo)

    def feed(self, index: int, chunk: TokenChunk) -> bytes:
        """The events of a chunk."""
        deltas = self.choices[index].feed(chunk)
        return b"".join([self._chunk(index, d, None) for d in deltas if isinstance(d, TextDelta)])

    def finish(self, index: int) -> bytes:
        """The choice's last events, with the log probabilities of trailing tokens without text."""
        deltas = self.choices[index].finish()
        rest = b"".join([self._chunk(index, d, None) for d in deltas if isinstance(d, TextDelta)])
        return rest + self._chunk(index, None, self._texts[index].finish_reason)

    def closing(self) -> bytes:
        """The usage, if requested, and the end of the stream."""
        return self._envelope.closing(self.choices)

    def failure(self, error: BatonError) -> bytes:
        """The event that ends a failed stream."""
        return sse.event(ErrorBody.of(error))

    def body(self) -> msgspec.Struct:
        """The whole answer."""
        return Completion(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self.model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=[text.body(index) for index, text in enumerate(self._texts)],
            usage=UsageBody.of(self.choices),
        )

    def _chunk(self, index: int, delta: TextDelta | None, finish_reason: FinishReason | None) -> bytes:
        text, logprobs = self._texts[index].write(delta)
        if not self.stream:
            return b""
        return self._chunk_of(index, text, finish_reason, logprobs)

    def _chunk_of(
        self,
        index: int,
        text: str,
        finish_reason: FinishReason | None = None,
        logprobs: LegacyLogprobs | None = None,
    ) -> bytes:
        choice = CompletionChoiceBody(index=index, text=text, finish_reason=finish_reason, logprobs=logprobs)
        return self._envelope.head + _encode(choice) + self._envelope.tail


class TextWriter:
    """Builds one choice's text, without stop string or stop token, and its log probabilities. `echo` is the
    text of the echoed prompt, if requested."""

    def __init__(self, choice: Choice, tokenizer: ModelTokenizer, body: CompletionBody) -> None:
        self.echo = text_of(choice.request.token_ids, tokenizer) if body.echo else ""
        self._is_silent = body.max_tokens == 0
        self._choice = choice
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._num_chars = 0
        self._num_given = 0  # tokens whose log probabilities were output

    @property
    def finish_reason(self) -> FinishReason:
        """Why the text ended."""
        return "length" if self._choice.is_cut else "stop"

    def write(self, delta: TextDelta | None) -> tuple[str, LegacyLogprobs | None]:
        """(the text of a delta, the log probabilities up to it); for None, the rest."""
        if self._is_silent:
            return "", None
        text = "" if delta is None else delta.text
        entries = self._choice.received.logprobs
        logprobs = None
        if entries is not None:
            stop = len(entries) if delta is None else delta.stop
            logprobs = legacy_logprobs(entries[self._num_given : stop], self._tokenizer, self._num_chars)
            self._num_given = stop
        self._texts.append(text)
        self._num_chars += len(text)
        return text, logprobs

    def body(self, index: int) -> CompletionChoiceBody:
        """The whole choice."""
        return CompletionChoiceBody(
            index=index,
            text=self.echo + "".join(self._texts),
            finish_reason=self.finish_reason,
            logprobs=self._logprobs(),
        )

    def _logprobs(self) -> LegacyLogprobs | None:
        received = self._choice.received
        entries = received.logprobs
        if entries is None:
            return None
        if not self.echo:
            return legacy_logprobs(entries, self._tokenizer, 0)
        told = [*received.prompt_logprobs, *([] if self._is_silent else entries)]
        return echoed_logprobs(self._choice.request.token_ids[0], told, self._tokenizer)
