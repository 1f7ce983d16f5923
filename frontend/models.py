"""The response bodies of `/v1/models`, in OpenAI's and in Anthropic's shapes."""

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


class ModelInfo(msgspec.Struct, kw_only=True):
    """A served model, for Anthropic's clients. `created_at` is an RFC 3339 time, `max_input_tokens` the
    context length."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    type: Literal["model"] = "model"


class ModelPage(msgspec.Struct, kw_only=True):
    """The response of `GET /v1/models` for Anthropic's clients: one page with all models."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool = False

    @classmethod
    def of(cls, models: list[ModelInfo]) -> "ModelPage":
        """The page of these models."""
        first_id, last_id = (models[0].id, models[-1].id) if models else (None, None)
        return cls(data=models, first_id=first_id, last_id=last_id)
