"""The real xgrammar over a model's vocabulary: which tokens a form allows."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xgrammar

from baton.messages import Guided
from baton.structural_tag import structural_tag
from tests.guided import MAX_TOKENS


class XgrammarForms:
    """Compiles forms as TensorRT-LLM and vLLM do, over one model's vocabulary.

    Without `control_ids`, control tokens are text, as in xgrammar before 0.2.
    """

    def __init__(self, model_path: Path, control_ids: dict[str, int]) -> None:
        self._control_ids = control_ids
        tokenizer = json.loads((model_path / "tokenizer.json").read_text())
        vocabulary: dict[str, int] = dict(tokenizer["model"]["vocab"])
        vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        self.vocab_size = max(vocabulary.values()) + 1
        words = [""] * self.vocab_size
        for word, token_id in vocabulary.items():
            words[token_id] = word
        info = xgrammar.TokenizerInfo(
            words,
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=self.vocab_size,
            stop_token_ids=[vocabulary["<|return|>"]],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._eos = vocabulary["<|return|>"]

    def matcher(self, form: Guided, stop_token_ids: list[int] | None = None) -> xgrammar.GrammarMatcher:
        """With the tokenizer's stop token, unless a request's are given, as vLLM 0.31 does."""
        tag = self._compiler.compile_structural_tag(structural_tag(form, self._control_ids))
        return xgrammar.GrammarMatcher(tag, override_stop_tokens=stop_token_ids)

    def takes(self, form: Guided, answer: list[int]) -> bool:
        """Whether each token is allowed, and then none. After `<|call|>` the engine stops by itself."""
        matcher = self.matcher(form)
        return all(map(matcher.accept_token, answer)) and (
            matcher.is_terminated() or matcher.accept_token(self._eos)
        )

    def answer_of(self, form: Guided, choose: Callable[[list[int]], int]) -> list[int]:
        """An answer whose tokens `choose` picks among the allowed ones; cut after MAX_TOKENS."""
        matcher, answer = self.matcher(form), list[int]()
        while len(answer) < MAX_TOKENS and not matcher.is_terminated():
            answer.append(choose(self.allowed(matcher)))
            assert matcher.accept_token(answer[-1])
        return answer

    def allowed(self, matcher: xgrammar.GrammarMatcher) -> list[int]:
        """The tokens that may come next."""
        bits = xgrammar.allocate_token_bitmask(1, self.vocab_size)
        matcher.fill_next_token_bitmask(bits)
        mask = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little", count=self.vocab_size)
        return np.flatnonzero(mask).tolist()
