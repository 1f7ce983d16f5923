"""The completion response body, in OpenAI's shape."""

from typing import Literal

import msgspec

from frontend.turn.logprobs import LegacyLogprobs
from frontend.turn.usage import UsageBody


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
