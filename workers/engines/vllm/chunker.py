"""Converts vLLM's outputs to chunks."""

from baton.errors import EngineFailure, HandoffFailed, WorkerLost
from baton.messages import FinishReason, GenerateRequest, TokenChunk, TokenLogprob, Usage
from workers.engines.logprobs import token_logprobs
from workers.engines.vllm.library import Completion, Result


class Chunker:
    """The chunks of one answer. `num_cached_tokens` is prefill's count; None: use vLLM's own."""

    def __init__(self, request: GenerateRequest, num_cached_tokens: int | None = None) -> None:
        self._request = request
        self._num_cached_tokens = num_cached_tokens
        self._num_generated = request.num_generated
        self._prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def chunk(self, result: Result) -> TokenChunk:
        """The chunk of this output. Raises the error of a failed finish reason."""
        (output,) = result.outputs
        reason = self._finish_reason(output)
        has_begun = self._has_begun
        self._num_generated += len(output.token_ids)
        self._note_prompt(result)
        usage = self._usage(result) if reason is not None or not has_begun else None
        scored = self._prompt_logprobs if reason is not None else None
        return TokenChunk(tuple(output.token_ids), reason, usage, self._logprobs(output), scored)

    def _usage(self, result: Result) -> Usage:
        num_prompt, num_cached = self._request.num_prompt_tokens, self._num_cached_tokens
        if num_cached is None:
            num_cached = result.num_cached_tokens or 0
        return Usage(num_prompt, min(num_cached, num_prompt), self._num_generated)

    def _note_prompt(self, result: Result) -> None:
        num_top = self._request.sampling.prompt_logprobs
        if num_top is not None and result.prompt_logprobs:
            told = [entries or {} for entries in result.prompt_logprobs[1:]]
            self._prompt_logprobs = token_logprobs(self._request.token_ids[1:], told, num_top)

    @property
    def _has_begun(self) -> bool:
        return self._num_generated > self._request.num_generated

    def _finish_reason(self, output: Completion) -> FinishReason | None:
        match output.finish_reason:
            case None:
                return None
            case "stop" | "length" as reason:
                return reason
            case "error" if self._request.handoff is not None and not self._has_begun:
                raise HandoffFailed("the KV did not arrive: its source is gone or has dropped it")
            case "abort":  # Baton does not read what it aborts: a signal told the engine to end
                raise WorkerLost("vLLM aborted the request as it shut down")
            case reason:
                raise EngineFailure(f"vLLM ended the request with {reason!r}; its log says why")

    def _logprobs(self, output: Completion) -> tuple[TokenLogprob, ...] | None:
        num_top = self._request.sampling.logprobs
        return None if num_top is None else token_logprobs(output.token_ids, output.logprobs, num_top)
