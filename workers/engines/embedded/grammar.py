"""Guided decoding: a request's form as an llguidance grammar, and the tokens that it allows next."""

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.errors import InvalidRequest
from baton.messages import Guided, MessageForm

COMPILE_TIMEOUT_S = 5.0
_NUM_CACHED = 64
# Bound what one schema can take: a lexer state is 1-2 kB, a thousand items of a step 50 us. An object with n
# optional properties comes to n * n / 2 items.
_LIMITS = LLParserLimits(
    max_lexer_states=50_000, max_grammar_size=200_000, step_max_items=250_000, verbose_errors=False
)
# Enough to write JSON in one line or indented; if it were free, an unsure model would write it for ever.
_WHITE_SPACE = r" ?|\n[ \t]{0,16}"
_CONTROL = re.compile(r"(<\|\w+\|>)")
# A control token has no text, so this matches none.
_TEXT = r"TEXT: /(.|\n)+/"


class Matcher:
    """Where one answer stands in its form. `error` says why it cannot be followed any further."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, param: str | None) -> None:
        self.error: InvalidRequest | None = None
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._param = param
        self._num_read = 0
        self._is_over = False

    def allowed(self, token_ids: Sequence[int], num_prompt: int) -> npt.NDArray[np.bool_] | None:
        """[vocab] whether a token may follow `token_ids`, the first `num_prompt` of which are the prompt;
        None: any may, since the form is complete or `error` is set.

        Each call reads the tokens that are new since the last: one in a running answer, all of them where
        an answer goes on that began elsewhere.
        """
        answer = token_ids[num_prompt + self._num_read :]
        self._num_read += len(answer)
        if not self._is_over:
            self._read(list(answer))
        if self._is_over:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            self._fail(_reason(self._matcher))
            return None
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _read(self, answer: list[int]) -> None:
        num_fitting = self._matcher.try_consume_tokens(answer)
        if self._matcher.is_error():
            self._fail(_reason(self._matcher))
        elif self._matcher.is_stopped():
            self._is_over = True
        elif num_fitting < len(answer):
            self._fail("the answer so far does not have it")

    def _fail(self, problem: str) -> None:
        self._is_over = True
        self.error = InvalidRequest(
            f"The form that was asked for cannot be enforced any further: {problem}.", param=self._param
        )


class Grammars:
    """Compiles forms for one tokenizer, on a thread of its own, and keeps the compiled ones used last."""

    def __init__(self, tokenizer: LLTokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[Guided, LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedded-grammar")

    @classmethod
    def load(cls, model_path: Path, vocab_size: int) -> "Grammars":
        """Reads `tokenizer.json`, about a second for gpt-oss; a model without one cannot be guided.

        Raises ValueError if the file is no tokenizer for a model with logits [vocab_size].
        """
        path = model_path / "tokenizer.json"
        tokenizer = LLTokenizer(str(path), n_vocab=vocab_size) if path.is_file() else None
        return cls(tokenizer, vocab_size)

    async def matcher(self, form: Guided) -> Matcher:
        """A matcher at the beginning of an answer. Raises InvalidRequest for what cannot be enforced."""
        loop = asyncio.get_running_loop()
        try:
            made = await asyncio.wait_for(
                loop.run_in_executor(self._thread, self._new_matcher, form), COMPILE_TIMEOUT_S
            )
        except TimeoutError:
            raise InvalidRequest(
                f"The schemas take more than {COMPILE_TIMEOUT_S:g} s to compile; simplify them.",
                param=_param(form),
            ) from None
        return Matcher(made, self._vocab_size, _param(form))

    def close(self) -> None:
        """End the thread, after what it has to do."""
        self._thread.shutdown(wait=False)

    def _new_matcher(self, form: Guided) -> LLMatcher:
        compiled = self._compiled.get(form)
        if compiled is None:
            compiled = self._compiled[form] = self._compile(form)
            if len(self._compiled) > _NUM_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(form)
        return compiled.deep_copy()

    def _compile(self, form: Guided) -> LLMatcher:
        if self._tokenizer is None:
            raise InvalidRequest("The model's folder has no tokenizer.json: nothing can be enforced.")
        for message in form.last + form.leading:
            if message.schema is not None:
                self._check_schema(message)
        matcher = LLMatcher(self._tokenizer, _grammar(form), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"The form cannot be enforced: {_reason(matcher)}.", param=_param(form))
        return matcher

    def _check_schema(self, message: MessageForm) -> None:
        """Alone, so that the error names the field of just this one."""
        grammar = json.dumps({"grammars": [_body(message, "start")]})
        problem = LLMatcher.validate_grammar(grammar, self._tokenizer, limits=_LIMITS)
        if problem and not problem.startswith("WARNING"):
            raise InvalidRequest(
                f"`{message.param}` has a schema that cannot be enforced: {problem.rstrip('.')}.",
                param=message.param,
            )


def _reason(matcher: LLMatcher) -> str:
    return matcher.get_error().partition("\n")[0].rstrip(".")


def _param(form: Guided) -> str | None:
    return next((message.param for message in form.last if message.param is not None), None)


def _grammar(form: Guided) -> str:
    """The form in llguidance's format: a Lark grammar of messages; each schema is a grammar of its own."""
    times = "?" if form.leads_once else "*"
    lark = [f"start: ({_any_of('leading', form.leading)}){times} ({_any_of('last', form.last)})", _TEXT]
    bodies = []
    for kind, messages in (("leading", form.leading), ("last", form.last)):
        for i, message in enumerate(messages):
            name = f"{kind}_{i}"
            lark.append(f"{name}: {_message(name, message)}")
            if message.schema is not None:
                bodies.append(_body(message, f"{name}_body"))
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": "\n".join(lark)}, *bodies]})


def _any_of(kind: str, messages: Iterable[MessageForm]) -> str:
    return " | ".join(f"{kind}_{i}" for i, _ in enumerate(messages)) or '""'


def _message(name: str, message: MessageForm) -> str:
    headers = " | ".join(_literal(header) for header in message.headers)
    body = "TEXT?" if message.schema is None else f"@{name}_body"
    return f"({headers}) {body} {_literal(message.end)}"


def _literal(text: str) -> str:
    """Control tokens stand for themselves, what is between them is quoted."""
    parts = [part for part in _CONTROL.split(text) if part]
    return " ".join(part if _CONTROL.fullmatch(part) else json.dumps(part) for part in parts) or '""'


def _body(message: MessageForm, name: str) -> dict[str, object]:
    try:
        schema = msgspec.json.decode(message.schema or "{}", type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{message.param}` is no schema: {error}.", param=message.param) from error
    # The key that the library reads its own settings from; a client's must not reach it.
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": message.lenient}
    return {"name": name, "json_schema": {**schema, "x-guidance": options}}
