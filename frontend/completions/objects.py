"""The body of a completion, in OpenAI's shape."""

from typing import Literal

import msgspec

from frontend.turn.logprobs import LegacyLogprobs
from frontend.turn.usage import UsageBody


class CompletionChoiceBody(msgspec.Struct, kw_only=True):
    """One answer; `finish_reason` is null in a stream until the last."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: LegacyLogprobs | None = None


class Completion(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/completions`."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoiceBody]
    usage: UsageBody
    system_fingerprint: str
    object: Literal["text_completion"] = "text_completion"
