"""A model that can be asked for, and the error of a prompt that is too long for it."""

import msgspec

from baton.errors import BatonError
from frontend.text.tokenizer import ModelTokenizer


class ServedModel(msgspec.Struct, frozen=True):
    """Its shortest context among the workers (tokens, prompt and answer together) and its tokenizer."""

    name: str
    context_length: int
    tokenizer: ModelTokenizer


class ContextTooLong(BatonError):
    """The prompt leaves no room for an answer in the model's context."""

    code = "context_length_exceeded"
    status = 400
    kind = "invalid_request_error"
