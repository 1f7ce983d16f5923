"""A served model, and the error for prompts that exceed its context."""

import msgspec

from baton.errors import BatonError
from frontend.text.tokenizer import ModelTokenizer

COUNTED_CONTEXTS = 2
"""A prompt of more than this many contexts is refused before the rest of it is tokenised."""


class ServedModel(msgspec.Struct, frozen=True):
    """A model and its tokenizer. `context_length` is the smallest among its workers, in tokens, for prompt
    and answer together; prompts name the `current_date`, YYYY-MM-DD."""

    name: str
    context_length: int
    tokenizer: ModelTokenizer
    current_date: str

    @property
    def max_counted_tokens(self) -> int:
        """A longer prompt is refused with `too_long`."""
        return COUNTED_CONTEXTS * self.context_length

    def too_long(self, path: str) -> "ContextTooLong":
        """The error for a prompt or tokens in the field `path` with more than `max_counted_tokens`."""
        return ContextTooLong(
            f"This model's maximum context length is {self.context_length} tokens, but `{path}` "
            f"has more than {self.max_counted_tokens} tokens. Shorten it.",
            param=path,
        )


class ContextTooLong(BatonError):
    """The prompt fills the model's context."""

    code = "context_length_exceeded"
    status = 400
    kind = "invalid_request_error"
