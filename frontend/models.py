"""`/v1/models`: the bodies."""

from typing import Literal

import msgspec


class ModelBody(msgspec.Struct, kw_only=True):
    """A served model; `context_length` is in tokens, prompt and answer together, and `max_model_len` is the
    same under vLLM's name."""

    id: str
    created: int
    context_length: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "baton"


class ModelList(msgspec.Struct, kw_only=True):
    """`GET /v1/models`."""

    data: list[ModelBody]
    object: Literal["list"] = "list"
