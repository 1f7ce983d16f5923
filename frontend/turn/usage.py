"""Token usage in the shape of chat and completions."""

from collections.abc import Sequence

import msgspec

from frontend.turn.choice import Choice, num_prompt_tokens


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
