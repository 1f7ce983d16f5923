"""A raw completion: from the body to the answer, streamed or whole."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from baton.errors import InvalidRequest
from baton.messages import FinishReason, TokenLogprob
from frontend.harmony.parse import Delta, Text, new_decoder
from frontend.http.answer import (
    ChoiceWriter,
    ChunkedAnswer,
    Envelope,
    UsageBody,
    finite,
)
from frontend.http.respond import Operations, asking, generating
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.choice import Choice
from frontend.turn.fields import CommonFields, Count, Refused, StopText, StopTexts, TokenId
from frontend.turn.request import TurnRequest


class LegacyLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities as parallel lists; `text_offset` counts characters of the choice's text. Control
    tokens are spelled out in `tokens`. The first token of an echoed prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoiceBody(msgspec.Struct):
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


class CompletionBody(CommonFields, kw_only=True):
    """`POST /v1/completions`: raw text or token ids; an array of either gives `n` choices for each.

    Control tokens spelled out in a text prompt are encoded as such; those of the answer are left out of its
    text unless `skip_special_tokens` is false. `max_tokens` defaults to 16. `echo` puts the prompt before
    the answer; with `logprobs` it includes the prompt's log probabilities and needs `max_tokens` 0 or 1."""

    refused: ClassVar[Refused] = {
        "suffix": (("",), "This model cannot insert text before a suffix."),
        "best_of": ((1,), "Use `n` and rank the choices yourself."),
    }

    prompt: str | list[str | TokenId | list[TokenId]]
    n: Count | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    stop: StopText | StopTexts | None = None
    echo: bool | None = None
    skip_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest.at("max_tokens", "0 needs `echo`: true.")
        if self.echo and self.logprobs is not None:
            if self.max_tokens not in {0, 1}:
                raise InvalidRequest("`echo` with `logprobs` needs `max_tokens` 0 or 1.", param="max_tokens")
            if self.stream:
                raise InvalidRequest("`echo` with `logprobs` cannot be streamed.", param="stream")


DEFAULT_MAX_TOKENS = 16

_encode = msgspec.json.Encoder().encode


def turn_request(body: CompletionBody, num_bytes: int) -> tuple[TurnRequest, Sequence[str]]:
    """The request of a body of `num_bytes`. Raises InvalidRequest for fields that contradict each other."""
    is_one = isinstance(body.prompt, str) or set(map(type, body.prompt)) <= {int}  # token ids may be many
    prompts: list[Any] = [body.prompt] if is_one else list(body.prompt)
    if int in map(type, prompts):
        raise InvalidRequest.at("prompt", "mixes token ids and strings; wrap each prompt's ids in an array.")
    if not all(prompts):
        raise InvalidRequest.at("prompt", "must not be empty.")
    request = TurnRequest(
        fields=body,
        prompt=tuple(prompts),
        shows_special=body.skip_special_tokens is False,
        path="prompt",
        num_bytes=num_bytes,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1),
        num_choices=body.n,
        stop=body.stop,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return request, ()


def chunked_answer(body: CompletionBody, choices: Sequence[Choice]) -> ChunkedAnswer:
    """The answer to a body."""
    envelope = Envelope("text_completion", "cmpl", choices[0].request.model, body)
    return ChunkedAnswer(envelope, choices, partial(TextWriter, body=body), Completion)


OPERATIONS: Operations = {
    ("POST", "/v1/completions"): generating(
        asking(CompletionBody, turn_request, chunked_answer),
        "Create a raw completion",
        Completion,
        CompletionBody,
        {"prompt": "Once upon a time", "max_tokens": 20},
    )
}


class TextWriter(ChoiceWriter):
    """Builds one choice's text, without stop string or stop token, and its log probabilities, after the text
    of the echoed prompt, if requested. With `max_tokens` 0 that is all."""

    def __init__(self, index: int, choice: Choice, envelope: Envelope, *, body: CompletionBody) -> None:
        super().__init__(index, choice, envelope)
        self._echo = (
            choice.tokenizer.decode(choice.request.token_ids, shows_special=True) if body.echo else ""
        )
        self._is_silent = body.max_tokens == 0
        self._texts: list[str] = []  # of an answer that is not streamed
        self._num_given = 0  # tokens whose log probabilities were output
        self._decode, self._num_chars = new_decoder().decode, 0  # of these, in the text
        num_echoed = len(choice.request.token_ids) if body.echo else 0
        self._shows_special = chain(repeat(True, num_echoed), repeat(body.skip_special_tokens is False))

    def opening(self) -> bytes:
        return self._chunk(self._echo, None) if self._echo else b""

    def write(self, deltas: Sequence[Delta]) -> bytes:
        texts = [delta for delta in deltas if isinstance(delta, Text) and not self._is_silent]
        if self.stream:
            return b"".join([self._chunk(delta.text, self._logprobs(delta.stop)) for delta in texts])
        self._texts += [delta.text for delta in texts]
        return b""

    def end(self) -> bytes:
        """The last chunk, with the log probabilities of trailing tokens without text."""
        return self._chunk("", self._logprobs(None), self._finish_reason)

    def body(self) -> CompletionChoiceBody:
        text = "".join([self._echo, *self._texts])
        return CompletionChoiceBody(self.index, text, self._finish_reason, self._logprobs(None))

    @property
    def _finish_reason(self) -> FinishReason:
        return "length" if self.choice.is_cut else "stop"

    def _chunk(
        self, text: str, logprobs: LegacyLogprobs | None, finish_reason: FinishReason | None = None
    ) -> bytes:
        choice = CompletionChoiceBody(self.index, text, finish_reason, logprobs)
        return self.head + _encode(choice) + self.tail

    def _logprobs(self, stop: int | None) -> LegacyLogprobs | None:
        """The next ones, up to a token; None: of all that are left."""
        entries = self.choice.logprobs
        if entries is None:
            return None
        start, self._num_given = self._num_given, len(entries) if stop is None else stop
        entries, unscored = entries[start : self._num_given], self.choice.request.token_ids[:0]
        if self._echo:  # such an answer is not streamed
            entries = [*self.choice.prompt_logprobs, *(() if self._is_silent else entries)]
            unscored = self.choice.request.token_ids[:1]
        return legacy_logprobs(entries, self.choice.tokenizer, self._offset, unscored)

    def _offset(self, token_id: int) -> int:
        """Where the next token begins; a character in several tokens counts with the last one."""
        start, shows_special = self._num_chars, next(self._shows_special)
        data = self.choice.tokenizer.bytes_of((token_id,), shows_special=shows_special)
        self._num_chars += len(self._decode(data))
        return start


def legacy_logprobs(
    entries: Sequence[TokenLogprob],
    tokenizer: ModelTokenizer,
    offset_of: Callable[[int], int],
    unscored: Sequence[int] = (),
) -> LegacyLogprobs:
    """The completions API's shape, after the ids of tokens without probabilities. `offset_of` is called with
    the id of each token, in order."""

    def text(token_id: int) -> str:
        return tokenizer.decode((token_id,), shows_special=True)

    ids, none = [*unscored, *(entry.token_id for entry in entries)], [None] * len(unscored)
    tops = ({text(token_id): finite(logprob) for token_id, logprob in entry.top} for entry in entries)
    return LegacyLogprobs(
        tokens=list(map(text, ids)),
        token_logprobs=[*none, *(finite(entry.logprob) for entry in entries)],
        top_logprobs=[*none, *tops],
        text_offset=list(map(offset_of, ids)),
    )
