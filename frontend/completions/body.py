"""The body of a completion request, as a struct that validates what it decodes."""

from typing import Annotated, ClassVar

import msgspec

from frontend.turn.fields import ChoiceFields, Refused, StopText, TokenId

# Evaluation harnesses send more than OpenAI's four.
MAX_STOPS = 32


class CompletionBody(ChoiceFields, kw_only=True):
    """`POST /v1/completions`: raw text or token ids; a list of either gives `n` choices for each.

    Control tokens written in a text prompt are taken as such; those of the answer are left out of its text
    unless `skip_special_tokens` is false. `max_tokens` is 16 unless given, as OpenAI's. `echo` puts the
    prompt before the answer, with `logprobs` its log probabilities, too: then of one answer token at most.
    """

    refused: ClassVar[Refused] = {
        **ChoiceFields.refused,
        "suffix": (("",), "Text cannot be inserted before a suffix."),
        "best_of": ((1,), "Answers are not ranked; use `n`."),
    }
    deep: ClassVar[frozenset[str]] = frozenset({"nvext", "stream_options", "structured_outputs"})

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    echo: bool | None = None
    skip_special_tokens: bool | None = None
