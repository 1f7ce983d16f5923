"""The constant parts of chat and completion chunks, encoded once per stream."""

import importlib.metadata
import time
from collections.abc import Sequence

import msgspec

from frontend.turn.choice import Choice, num_prompt_tokens
from frontend.turn.ids import new_id


class PromptDetails(msgspec.Struct, kw_only=True):
    """Breakdown of the prompt tokens; `cached_tokens` were found in the KV cache."""

    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct, kw_only=True):
    """Breakdown of the completion tokens."""

    reasoning_tokens: int = 0


class UsageBody(msgspec.Struct, kw_only=True):
    """Token counts of a whole answer; a prompt shared by several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> "UsageBody":
        """The counts of these choices so far."""
        num_prompt = num_prompt_tokens(choices)
        num_completion = sum(choice.received.num_tokens for choice in choices)
        firsts = (choice for choice in choices if choice.request.sampling.choice == 0)
        num_cached = sum(choice.received.num_cached_tokens for choice in firsts)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in choices)
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            completion_tokens_details=CompletionDetails(reasoning_tokens=num_reasoning),
            prompt_tokens_details=PromptDetails(cached_tokens=num_cached),
        )


SYSTEM_FINGERPRINT = f"baton-{importlib.metadata.version('baton')}"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class Envelope:
    """The fields shared by all chunks of an answer. `head` is a chunk up to its list of choices, `tail` is
    everything after that list."""

    def __init__(self, kind: str, id_prefix: str, model: str, *, has_usage: bool) -> None:
        self.id = new_id(id_prefix, "-")
        self.created = int(time.time())
        self.model = model
        self._has_usage = has_usage
        fixed = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        self.head = b"data: " + _encode(fixed)[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """The usage, if requested, and the end of the stream."""
        if not self._has_usage:
            return DONE
        return self.head + b'],"usage":' + _encode(UsageBody.of(choices)) + b"}\n\n" + DONE
