"""A served model, and the error for prompts that exceed its context."""

import msgspec

from baton.errors import BatonError
from frontend.text.tokenizer import ModelTokenizer


class ServedModel(msgspec.Struct, frozen=True):
    """A model and its tokenizer. `context_length` is the smallest among its workers, in tokens, for prompt
    and answer together; prompts name the `current_date`, YYYY-MM-DD."""

    name: str
    context_length: int
    tokenizer: ModelTokenizer
    current_date: str


class ContextTooLong(BatonError):
    """The prompt fills the model's context."""

    code = "context_length_exceeded"
    status = 400
    kind = "invalid_request_error"
