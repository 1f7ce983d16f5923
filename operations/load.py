"""A load on a running frontend: streamed chats of random words, as a closed or an open loop; for bench."""

import contextlib
import dataclasses
import json
import random
import threading
import time
from collections import deque
from typing import Any

import msgspec

from baton.flags import flag
from operations.client import Client, FrontendError, FrontendFlags

MOST_REQUESTS, MOST_AT_ONCE, MOST_S = 100_000, 1000, 3600.0
_MOST_TOKENS = 1_000_000
_WORDS = (
    "time year people day thing life world school state family group country problem hand part place week "
    "company system question work room number night point home water area money story fact month right book"
)
_MAX_LINE_BYTES = 1 << 20
_PAUSE_S = 0.2
"""After a failure, so that a closed loop sends no thousands of requests to a frontend that refuses all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadFlags(FrontendFlags):
    """What is sent, and for how long."""

    model: str = flag("", "the served model; default: the first one", metavar="NAME")
    requests: int | None = flag(
        None, "stop after N; default: 100 without --seconds", metavar="N", at_least=1, at_most=MOST_REQUESTS
    )
    seconds: float | None = flag(None, "send no more after S seconds", metavar="S", above=0, at_most=MOST_S)
    concurrency: int = flag(8, "N requests at a time", metavar="N", at_least=1, at_most=MOST_AT_ONCE)
    rate: float = flag(0.0, "instead, N new requests a second", metavar="N", above=0, at_most=1000)
    isl: int = flag(256, "tokens of a prompt, about", metavar="N", at_least=1, at_most=_MOST_TOKENS)
    osl: int = flag(64, "tokens of an answer", metavar="N", at_least=1, at_most=_MOST_TOKENS)
    turns: int = flag(1, "of a conversation; each adds --isl", metavar="N", at_least=1, at_most=1000)
    timeout_s: float = flag(120.0, "a request that takes longer has failed", above=0, at_most=MOST_S)


@dataclasses.dataclass
class Sample:
    """One request. Times are in seconds: `began_s` since the load began, the others since the request did.
    `failure` is its status and code, or why there was no answer.
    """

    began_s: float
    first_s: float | None = None
    last_s: float = 0.0
    duration_s: float = 0.0
    longest_gap_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    failure: str = ""

    @property
    def itl_s(self) -> float | None:
        """Mean time between tokens, as AIPerf defines it; None for fewer than two."""
        if self.first_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    def add(self, event: dict[str, Any], after_s: float) -> str:
        """Count a chunk that came so long after the request began. Returns its text."""
        if usage := event.get("usage"):
            self.num_prompt_tokens = int(usage["prompt_tokens"])
            self.num_tokens = int(usage["completion_tokens"])
            self.num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        delta = choices[0]["delta"] if (choices := event.get("choices")) else {}
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
        if text or delta.get("tool_calls"):
            if self.first_s is None:
                self.first_s = self.last_s = after_s
            self.longest_gap_s = max(self.longest_gap_s, after_s - self.last_s)
            self.last_s = after_s
        return str(text)


class Load:
    """Sends what the flags say. Each conversation begins with words of its own, so that only its later turns
    find a prefix in a cache. Raises FrontendError if the frontend answers none.
    """

    def __init__(self, client: Client, flags: LoadFlags) -> None:
        self.samples: list[Sample] = []
        self.num_sent = 0
        self.model = flags.model or _first_model(client)
        self.most = flags.requests or (MOST_REQUESTS if flags.seconds else 100)
        self._most_s = flags.seconds or MOST_S
        self._client = client
        self._flags = flags
        self._began_s = time.perf_counter()
        self._idle: deque[list[dict[str, str]]] = deque()
        few, many = (self._num_prompt_tokens(num_words) for num_words in (1, 101))
        tokens_per_word = max(0.1, (many - few) / 100 or 1.0)
        self._num_first = max(1, round((flags.isl - few) / tokens_per_word) + 1)
        self._num_more = max(1, round(flags.isl / tokens_per_word))
        self._num_prompt_tokens(self._num_first)

    def _num_prompt_tokens(self, num_words: int) -> int:
        """Of a request with so many words, which also warms the workers up."""
        sample = Sample(0.0)
        self._ask(sample, [_question(num_words)], num_tokens=1)
        return sample.num_prompt_tokens

    @property
    def passed_s(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began_s

    @property
    def share(self) -> float:
        """How much of it is done, at most 1."""
        return min(1.0, max(len(self.samples) / self.most, self.passed_s / self._most_s))

    def run(self) -> None:
        """Send all of it, and wait for the answers."""
        rate, due_s = self._flags.rate, 0.0
        num_places = MOST_AT_ONCE if rate else self._flags.concurrency
        places = threading.Semaphore(num_places)
        self._began_s = time.perf_counter()
        while self.num_sent < self.most:
            if rate:
                due_s += random.expovariate(rate)
                time.sleep(min(max(0.0, due_s - self.passed_s), self._most_s))
            left_s = self._most_s - self.passed_s
            if left_s <= 0 or not places.acquire(timeout=left_s):
                break
            self.num_sent += 1
            threading.Thread(target=self._turn, args=[places], daemon=True).start()
        for _ in range(num_places):
            places.acquire()

    def _turn(self, places: threading.Semaphore) -> None:
        """The next turn of a conversation that waits for one, else the first of a new one."""
        sample, messages = Sample(self.passed_s), list[dict[str, str]]()
        with contextlib.suppress(IndexError):
            messages = self._idle.popleft()
        messages.append(_question(self._num_more if messages else self._num_first))
        try:
            text = self._ask(sample, messages, self._flags.osl)
            if len(messages) < 2 * self._flags.turns - 1:
                self._idle.append([*messages, {"role": "assistant", "content": text or "-"}])
        except FrontendError as error:
            sample.failure = f"{error.status} {error.code}".strip() if error.status else str(error)
        sample.duration_s = self.passed_s - sample.began_s
        self.samples.append(sample)
        if sample.failure:
            time.sleep(_PAUSE_S)
        places.release()

    def _ask(self, sample: Sample, messages: list[dict[str, str]], num_tokens: int) -> str:
        """Send one request. Returns the text of its answer; raises FrontendError."""
        lengths = {"max_tokens": num_tokens, "min_tokens": num_tokens, "ignore_eos": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({"model": self.model, "messages": messages, **lengths, **stream}).encode()
        texts, began_s, timeout_s = list[str](), time.perf_counter(), self._flags.timeout_s
        with self._client.send("/v1/chat/completions", body, timeout_s) as answer:
            while line := answer.readline(_MAX_LINE_BYTES):
                if (after_s := time.perf_counter() - began_s) > timeout_s:
                    raise TimeoutError
                if line.startswith(b'data: {"error"'):
                    raise self._client.error(line[6:], 200)
                if line.startswith(b"data: {"):
                    texts.append(sample.add(json.loads(line[6:]), after_s))
                elif line.startswith(b"data: [DONE]"):
                    return "".join(texts)
            raise ConnectionError("its stream ended too early")


def _question(num_words: int) -> dict[str, str]:
    words = random.choices(_WORDS.split(), k=num_words)  # noqa: S311  no secret
    return {"role": "user", "content": " ".join(words)}


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _first_model(client: Client) -> str:
    if served := client.get("/v1/models", _Models).data:
        return served[0].id
    raise FrontendError(f"{client.url} serves no model yet; python -m baton status shows what is missing")
