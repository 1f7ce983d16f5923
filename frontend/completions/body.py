"""The body of a completion request, as a struct that validates what it decodes."""

from typing import Annotated, ClassVar

import msgspec

from frontend.turn.fields import ChoiceFields, Refused, TokenId


class CompletionBody(ChoiceFields, kw_only=True):
    """`POST /v1/completions`: raw text or token ids; a list of either gives `n` choices for each.

    Control tokens written in a text prompt are taken as such; those of the answer are left out of its text
    unless `skip_special_tokens` is false. `max_tokens` is 16 unless given, as OpenAI's.
    """

    refused: ClassVar[Refused] = {
        **ChoiceFields.refused,
        "suffix": (("",), "Text cannot be inserted before a suffix."),
        "echo": ((False,), "The prompt is not echoed; put it before the answer yourself."),
        "best_of": ((1,), "Answers are not ranked; use `n`."),
    }
    deep: ClassVar[frozenset[str]] = frozenset({"nvext", "stream_options", "structured_outputs"})

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    skip_special_tokens: bool | None = None
