"""The response bodies of `/v1/models`."""

from typing import Literal

import msgspec


class ModelBody(msgspec.Struct, kw_only=True):
    """A served model. `context_length` is in tokens, for prompt and answer together; `max_model_len` is the
    same value under vLLM's name."""

    id: str
    created: int
    context_length: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "baton"


class ModelList(msgspec.Struct, kw_only=True):
    """The response of `GET /v1/models`."""

    data: list[ModelBody]
    object: Literal["list"] = "list"
