"""The completion request body, as a validating struct."""

from typing import Annotated, ClassVar

import msgspec

from frontend.turn.fields import ChoiceFields, Refused, StopText, TokenId

# Evaluation harnesses send more than OpenAI's four.
MAX_STOPS = 32


class CompletionBody(ChoiceFields, kw_only=True):
    """`POST /v1/completions`: raw text or token ids; an array of either gives `n` choices for each.

    Control tokens spelled out in a text prompt are encoded as such; those of the answer are left out of its
    text unless `skip_special_tokens` is false. `max_tokens` defaults to 16. `echo` puts the prompt before
    the answer; with `logprobs` it includes the prompt's log probabilities and needs `max_tokens` 0 or 1.
    """

    refused: ClassVar[Refused] = {
        **ChoiceFields.refused,
        "suffix": (("",), "This model cannot insert text before a suffix."),
        "best_of": ((1,), "Use `n` and rank the choices yourself."),
    }
    deep: ClassVar[frozenset[str]] = frozenset({"nvext", "stream_options", "structured_outputs"})

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    echo: bool | None = None
    skip_special_tokens: bool | None = None
