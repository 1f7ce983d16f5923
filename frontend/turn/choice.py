"""One choice of an answer: token chunks in; reasoning, text and tool calls out, up to the stop condition."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Literal

import msgspec
from msgspec.structs import replace

from baton.messages import FinishReason as WorkerFinishReason
from baton.messages import GenerateRequest, TokenChunk, TokenLogprob
from frontend.harmony.conversation import Tool, WrittenMessage
from frontend.harmony.parse import Begin, Delta, End, HarmonyParser, ReadMessage, Text, new_decoder
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.ids import new_id
from frontend.turn.thoughts import PARAGRAPH, written_messages

FinishReason = Literal["stop", "length", "tool_calls"]


class RawText:
    """As `HarmonyParser`, but everything is visible text; `shows_special` includes control tokens."""

    num_reasoning_tokens = 0
    messages: Sequence[ReadMessage] = ()

    def __init__(self, tokenizer: ModelTokenizer, *, shows_special: bool = False) -> None:
        self.repairs: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._decode = new_decoder().decode
        self._num_read = self._num_sent = 0

    def finish(self) -> list[Delta]:
        return self.feed((), is_last=True)

    def feed(self, token_ids: Sequence[int], *, is_last: bool = False) -> list[Delta]:
        self._num_read += len(token_ids)
        data = self._tokenizer.bytes_of(token_ids, shows_special=self._shows_special)
        text = self._decode(data, is_last)
        if not text:
            return []
        start, self._num_sent = self._num_sent, self._num_read
        return [Text(text, start, self._num_read)]


class StopStrings:
    """Ends an answer before the stop string that is complete first in its visible text, however that is
    split; from then on it is `met`. Text that may be the start of one is held back."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.met: str | None = None
        self._stop_strings = stop_strings
        self._held: Text | None = None
        self._is_visible = True  # the open message

    def kept(self, deltas: Sequence[Delta], *, is_last: bool = False) -> Iterator[Delta]:
        """The deltas up to the end; if they are the last ones, with all text that is held back."""
        for delta in deltas:
            if self.met is not None:
                return
            match delta:
                case Text() if self._is_visible:
                    yield from self._text(delta)
                    continue
                case Begin(kind):
                    self._is_visible = kind in {"text", "preamble"}
                case End():
                    yield from self._rest()  # stop strings do not span messages
            yield delta
        if is_last:
            yield from self._rest()

    def _rest(self) -> Iterator[Text]:
        """The text that is not the start of a stop string after all."""
        if self._held is not None:
            yield self._held
        self._held = None

    def _text(self, delta: Text) -> Iterator[Text]:
        text, start = delta.text, delta.start
        if self._held is not None:
            text, start = self._held.text + text, self._held.start
        found = [(at + len(stop), at, stop) for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        if found:
            _, num_safe, self.met = min(found)
        else:
            num_safe = len(text) - self._num_doubtful(text)
        if num_safe:
            yield Text(text[:num_safe], start, delta.stop)
            start = delta.stop  # this text has the tokens
        is_held = num_safe < len(text) and not found
        self._held = Text(text[num_safe:], start, delta.stop) if is_held else None

    def _num_doubtful(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        num_doubtful = 0
        for stop in self._stop_strings:
            if text[-1:] in stop[:-1]:
                # From the longest: while one is held back, the first one is found.
                longer = range(min(len(stop) - 1, len(text)), num_doubtful, -1)
                num_doubtful = next((num for num in longer if text.endswith(stop[:num])), num_doubtful)
        return num_doubtful


class _Wrapped(msgspec.Struct, forbid_unknown_fields=True):
    input: str


def _unwrapped(parts: Sequence[Text]) -> Text:
    """The input of a call whose arguments are text, which the model may have wrapped in JSON."""
    text = "".join(part.text for part in parts)
    with suppress(msgspec.DecodeError):
        text = msgspec.json.decode(text, type=_Wrapped).input
    return replace(parts[0], text=text)


def single_tokens(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """Each token of a chunk; a chunk without tokens as it is."""
    if len(chunk.token_ids) < 2:
        yield chunk
        return
    last = len(chunk.token_ids) - 1
    for i, token_id in enumerate(chunk.token_ids):
        logprobs = chunk.logprobs and chunk.logprobs[i : i + 1]
        usage = chunk.usage if i == 0 else None  # a stop string may end the answer at any token
        ends = (chunk.finish_reason, chunk.prompt_logprobs) if i == last else (None, None)
        yield TokenChunk((token_id,), ends[0], usage, logprobs, ends[1])


class Choice:
    """`request` goes to a worker. `stopped`: a stop string or the call limit has ended the answer. `logprobs`
    has an entry per token, or is None if not requested; `prompt_logprobs` one per prompt token except the
    first. A final stop token in `cut_ids` is counted, but is not part of the text. `tools` are those that are
    offered. `caller`: see `Client.caller`."""

    def __init__(
        self,
        request: GenerateRequest,
        reader: HarmonyParser | RawText,
        tokenizer: ModelTokenizer,
        *,
        stop_strings: Sequence[str] = (),
        max_calls: int | None = None,
        cut_ids: Iterable[int] = (),
        tools: Sequence[Tool] = (),
        caller: str = "",
        on_finish: Callable[["Choice"], None] = lambda _: None,
    ) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.caller = caller
        self.stopped = False
        self.stop_string: str | None = None  # that ended the text
        self.call_ids: list[str] = []
        self.num_tokens = self.num_cached_tokens = 0
        self.logprobs: list[TokenLogprob] | None = None if request.sampling.logprobs is None else []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.repairs = reader.repairs  # of malformed output, by kind
        self._reader = reader
        self._stop_strings = StopStrings(stop_strings) if stop_strings else None
        self._max_calls = max_calls
        self._is_limited = bool(stop_strings) or max_calls is not None
        self._cut_ids = frozenset(cut_ids)
        self.tools = {tool.called: tool for tool in tools}
        self._held: list[Text] | None = None  # the arguments of an open call whose text may be wrapped
        self._on_finish = on_finish
        self._reason: WorkerFinishReason = "stop"
        self._token_ids: list[int] = []
        self._thought: list[str] = []
        self._thinks = False  # in the open message

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended; valid once it has."""
        reason = "stop" if self.stopped else self._reason
        return "tool_calls" if reason == "stop" and self.call_ids else reason

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended at its token limit."""
        return self.finish_reason == "length"

    def written(self) -> tuple[WrittenMessage, ...]:
        """The messages as the model wrote them, if the answer is complete and was read as it is written, else
        its reasoning, whose tokens are not known."""
        is_whole = not (self.is_cut or self.stopped or self.repairs)
        whole = written_messages(self._token_ids, self._reader.messages, self.tokenizer) if is_whole else ()
        thought = WrittenMessage(kind="thought", text="".join(self._thought), token_ids=array("I"))
        return whole or ((thought,) if thought.text else ())

    def feed(self, chunk: TokenChunk) -> list[Delta]:
        """The deltas that a chunk completes. Tokens after the one that meets a limit do not count."""
        token_ids = chunk.token_ids
        if self._is_limited and len(token_ids) > 1:
            deltas = []
            for each in single_tokens(chunk):
                deltas += self.feed(each)
                if self.stopped:
                    break
            return deltas
        self.num_tokens += len(token_ids)
        if self.logprobs is not None:
            self.logprobs += chunk.logprobs or ()
        if chunk.usage is not None:
            self.num_cached_tokens = chunk.usage.num_cached_tokens
        if chunk.finish_reason is not None:
            self.prompt_logprobs = chunk.prompt_logprobs or ()
            self._reason = chunk.finish_reason
            if chunk.finish_reason == "stop" and token_ids and token_ids[-1] in self._cut_ids:
                token_ids = token_ids[:-1]
        self._token_ids += token_ids
        return self._noted(self._reader.feed(token_ids))

    def finish(self) -> list[Delta]:
        deltas = [] if self.stopped else self._noted(self._reader.finish(), is_last=True)
        self._on_finish(self)
        return deltas

    def logprobs_of(self, delta: Text) -> list[TokenLogprob] | None:
        """The log probabilities of the delta's tokens, if requested."""
        return None if self.logprobs is None else self.logprobs[delta.start : delta.stop]

    def _noted(self, deltas: list[Delta], *, is_last: bool = False) -> list[Delta]:
        """The deltas that can be sent, recorded, with an id assigned to each call."""
        if self._stop_strings is not None:
            deltas = list(self._stop_strings.kept(deltas, is_last=is_last))
            self.stop_string = self._stop_strings.met
            self.stopped = self.stop_string is not None
        noted: list[Delta] = []
        for delta in deltas:
            match delta:
                case Text():
                    if self._held is not None:
                        self._held.append(delta)
                        continue
                    if self._thinks:
                        self._thought.append(delta.text)
                case Begin("call") if len(self.call_ids) == self._max_calls:
                    self.stopped = True
                    break
                case Begin("call", name):
                    tool = self.tools.get(name)
                    is_plain = tool is None or not tool.takes_text or tool.grammar is not None
                    self._thinks, self._held = False, None if is_plain else []
                    ids = self.call_ids  # `Thoughts` finds the answer by any of them
                    ids.append(f"{ids[0]}-{len(ids)}" if ids else new_id("call"))
                    delta = replace(delta, call_id=self.call_ids[-1])  # noqa: PLW2901  the one with an id
                case Begin(kind):
                    self._thinks, self._held = kind == "thought", None
                    self._thought += [PARAGRAPH] if self._thinks and self._thought else []
                case End() if self._held:
                    noted.append(_unwrapped(self._held))
            noted.append(delta)
        return noted


def num_prompt_tokens(choices: Iterable[Choice]) -> int:
    """Tokens of all prompts; a prompt shared by several choices counts once."""
    return sum([len(c.request.token_ids) for c in choices if c.request.sampling.choice == 0])
