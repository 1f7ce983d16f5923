"""Log probabilities in OpenAI's two shapes, from token ids."""

from collections.abc import Sequence

import msgspec

from baton.messages import TokenLogprob
from frontend.text.tokenizer import ModelTokenizer


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens; `bytes` are its UTF-8 bytes, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    """A token of the visible text, and the likeliest tokens in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class LegacyLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities as parallel lists; `text_offset` counts characters of the choice's text. The first
    token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def content_logprobs(entries: Sequence[TokenLogprob], tokenizer: ModelTokenizer) -> list[ContentLogprob]:
    """The chat API's shape: one object for each token."""
    return [_content_logprob(entry, tokenizer) for entry in entries]


def _content_logprob(entry: TokenLogprob, tokenizer: ModelTokenizer) -> ContentLogprob:
    data = tokenizer.token_bytes(entry.token_id)
    top = [(tokenizer.token_bytes(token_id), logprob) for token_id, logprob in entry.top]
    return ContentLogprob(
        token=_text(data),
        logprob=_finite(entry.logprob),
        bytes=list(data),
        top_logprobs=[TopLogprob(_text(data), _finite(logprob), list(data)) for data, logprob in top],
    )


def legacy_logprobs(
    entries: Sequence[TokenLogprob], tokenizer: ModelTokenizer, offset: int
) -> LegacyLogprobs:
    """The completion API's shape; `offset` is the first token's, in characters of the choice's text."""
    texts = [_text(tokenizer.token_bytes(entry.token_id)) for entry in entries]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return LegacyLogprobs(
        tokens=texts,
        token_logprobs=[_finite(entry.logprob) for entry in entries],
        top_logprobs=[
            {_text(tokenizer.token_bytes(token_id)): _finite(logprob) for token_id, logprob in entry.top}
            for entry in entries
        ],
        text_offset=offsets,
    )


def echoed_logprobs(
    first_id: int, entries: Sequence[TokenLogprob], tokenizer: ModelTokenizer
) -> LegacyLogprobs:
    """The completion API's shape of a prompt that begins with `first_id`, and what follows it."""
    first = _text(tokenizer.token_bytes(first_id))
    rest = legacy_logprobs(entries, tokenizer, len(first))
    return LegacyLogprobs(
        tokens=[first, *rest.tokens],
        token_logprobs=[None, *rest.token_logprobs],
        top_logprobs=[None, *rest.top_logprobs],
        text_offset=[0, *rest.text_offset],
    )


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token of no probability."""
    return max(logprob, -9999.0)
