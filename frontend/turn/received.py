"""The tokens of one choice as they arrive: their counts, their log probabilities, and which are its text."""

from collections.abc import Iterable

from baton.messages import FinishReason, Sampling, TokenChunk, TokenLogprob


class ReceivedTokens:
    """What has arrived so far. `logprobs` has an entry for each token, or is None unless they were asked for;
    so has `prompt_logprobs` for each token of the prompt but its first.

    A stop token of `cut_ids` that ends the answer is counted, but is no part of its text.
    """

    def __init__(self, sampling: Sampling, cut_ids: Iterable[int]) -> None:
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason = "stop"
        self.logprobs: list[TokenLogprob] | None = None if sampling.logprobs is None else []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._cut_ids = frozenset(cut_ids)

    def take(self, chunk: TokenChunk) -> tuple[int, ...]:
        """The chunk's tokens that are text."""
        token_ids = chunk.token_ids
        self.num_tokens += len(token_ids)
        if self.logprobs is not None:
            self.logprobs += chunk.logprobs or ()
        if chunk.finish_reason is None:
            return token_ids
        self.prompt_logprobs = chunk.prompt_logprobs or ()
        self.finish_reason = chunk.finish_reason
        self.num_cached_tokens = chunk.usage.num_cached_tokens if chunk.usage else 0
        is_cut = chunk.finish_reason == "stop" and token_ids and token_ids[-1] in self._cut_ids
        return token_ids[:-1] if is_cut else token_ids
