"""The tokens received for one choice: counts, log probabilities, and which of them are text."""

from collections.abc import Iterable

from baton.messages import FinishReason, Sampling, TokenChunk, TokenLogprob


class ReceivedTokens:
    """`logprobs` has an entry per token, or is None if not requested; `prompt_logprobs` has an entry per
    prompt token except the first.

    A final stop token in `cut_ids` is counted, but is not part of the text.
    """

    def __init__(self, sampling: Sampling, cut_ids: Iterable[int]) -> None:
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason = "stop"
        self.logprobs: list[TokenLogprob] | None = None if sampling.logprobs is None else []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._cut_ids = frozenset(cut_ids)

    def take(self, chunk: TokenChunk) -> tuple[int, ...]:
        """Record the chunk; returns the tokens that are text."""
        token_ids = chunk.token_ids
        self.num_tokens += len(token_ids)
        if self.logprobs is not None:
            self.logprobs += chunk.logprobs or ()
        if chunk.usage is not None:
            self.num_cached_tokens = chunk.usage.num_cached_tokens
        if chunk.finish_reason is None:
            return token_ids
        self.prompt_logprobs = chunk.prompt_logprobs or ()
        self.finish_reason = chunk.finish_reason
        is_cut = chunk.finish_reason == "stop" and token_ids and token_ids[-1] in self._cut_ids
        return token_ids[:-1] if is_cut else token_ids
