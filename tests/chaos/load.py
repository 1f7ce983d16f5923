"""Concurrent streams for as long as a fault lasts, each compared with an undisturbed run of its request."""

import dataclasses
import json
import random
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import httpx

from tests.stack import MODEL
from tests.waiting import scaled

HUNG_S = scaled(90.0)
"""More than what a stream may wait for: 65 s for embedded workers' restart, 20 s for a stuck worker."""
_REFUSED = {429, 503}
_AGAIN_S = 0.2
_DONE = "[DONE]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """A request. It is sampled with its seed: a token of the embedded engine depends on all before it."""

    prompt: str
    num_tokens: int
    seed: int

    def body(self) -> dict[str, object]:
        """Of a streamed completion."""
        fields = {"prompt": self.prompt, "max_tokens": self.num_tokens, "seed": self.seed}
        return {"model": MODEL, "stream": True, "temperature": 1.0, "ignore_eos": True, **fields}


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What a client saw. `error` says why its stream ended early; `longest_gap_s` includes its first token.
    `num_refused`: how often it got a Retry-After, and came back. `num_resumed`: how often its connection
    was cut, and it came back for the rest. `event_id`: of the last event."""

    ask: Ask
    text: str = ""
    error: str = ""
    is_finished: bool = False
    is_hung: bool = False
    is_different: bool = False
    longest_gap_s: float = 0.0
    num_refused: int = 0
    num_resumed: int = 0
    event_id: str = ""
    has_last_token: bool = False

    def judge(self, expected: str) -> None:
        """Compare its text with that of the undisturbed run."""
        is_whole = not (self.error or self.is_hung)
        self.is_different = self.text != expected if is_whole else not expected.startswith(self.text)

    def take(self, data: str) -> None:
        """One event of the stream."""
        if data == _DONE:
            self.is_finished = self.has_last_token
            return
        event = json.loads(data)
        self.error = str(event.get("error", self.error))
        for choice in event.get("choices", []):
            self.text += choice["text"]
            self.has_last_token |= choice["finish_reason"] == "length"

    @property
    def end(self) -> Literal["exact", "different", "hung", "lost"]:
        """How it ended."""
        if self.is_different:
            return "different"
        return "hung" if self.is_hung else "lost" if self.error else "exact"


def asks(seed: int, num_tokens: int, most_words: int) -> list[Ask]:
    """Requests with short and long prompts; the longest answer has `num_tokens`."""
    chance = random.Random(seed)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    lengths = [min(num_words, most_words) for num_words in (5, 20, 80, 300, 600, 900)]
    prompts = [" ".join(chance.choices(words, k=num_words)) for num_words in lengths]
    return [
        Ask(prompt=prompt, num_tokens=num_tokens * (i % 3 + 1) // 3, seed=chance.randrange(2**31))
        for i, prompt in enumerate(prompts)
    ]


class Load:
    """Clients that each read one stream after another until they are stopped; if they `resume`, they come
    back for the rest of a stream that is cut."""

    def __init__(
        self, url: str, expected: dict[Ask, str], num_streams: int, seed: int, *, resume: bool = False
    ) -> None:
        self._url = url
        self._resume = resume
        self._expected = expected
        self._stopping = threading.Event()
        self._begun = [threading.Event() for _ in range(num_streams)]
        self._pool = ThreadPoolExecutor(num_streams)
        self._clients = [self._pool.submit(self._client, seed + i, i) for i in range(num_streams)]

    def wait_running(self) -> None:
        """Return when each client has got a token."""
        for begun in self._begun:
            begun.wait(HUNG_S)

    def stop(self) -> list[Outcome]:
        """All streams, after the running ones were read to their ends."""
        self._stopping.set()
        self._pool.shutdown()
        return [outcome for client in self._clients for outcome in client.result()]

    def _client(self, seed: int, number: int) -> list[Outcome]:
        chance = random.Random(seed)
        outcomes = []
        # Without certificates, which take 45 ms of CPU to load.
        with httpx.Client(timeout=HUNG_S, verify=False) as client:
            while not self._stopping.is_set():
                ask = chance.choice(list(self._expected))
                key = uuid.uuid4().hex if self._resume else ""
                outcomes.append(outcome := answered(client, self._url, ask, self._begun[number], key))
                outcome.judge(self._expected[ask])
                if outcome.error:
                    time.sleep(1.0)  # nothing may listen yet
        return outcomes


def expected_of(url: str, wanted: Sequence[Ask]) -> dict[Ask, str]:
    """The answers of undisturbed runs; fails if there are none."""
    with httpx.Client(timeout=HUNG_S, verify=False) as client:
        outcomes = [answered(client, url, ask, threading.Event()) for ask in wanted]
    assert {outcome.end for outcome in outcomes} == {"exact"}, outcomes
    return {outcome.ask: outcome.text for outcome in outcomes}


def answered(
    client: httpx.Client, url: str, ask: Ask, begun: threading.Event, idempotency_key: str = ""
) -> Outcome:
    """Read one stream to its end; comes back later as often as it is asked to and, with a key, for the rest
    of a stream that was cut, for HUNG_S at most."""
    outcome = Outcome(ask=ask)
    began_s = time.monotonic()
    give_up_s = began_s + HUNG_S
    while time.monotonic() < give_up_s:
        if not outcome.num_resumed:
            began_s = time.monotonic()
        headers = {"idempotency-key": idempotency_key} if idempotency_key else {}
        headers |= {"last-event-id": outcome.event_id} if outcome.event_id else {}
        try:
            with client.stream("POST", f"{url}/v1/completions", json=ask.body(), headers=headers) as response:
                if response.status_code in _REFUSED:
                    outcome.num_refused += 1
                    time.sleep(float(response.headers["retry-after"]))  # as the server asks
                    continue
                began_s = _read(response, outcome, began_s, begun)
                if outcome.is_hung or outcome.error or outcome.is_finished:
                    return outcome
                outcome.error = "cut"
        except httpx.TimeoutException:
            outcome.is_hung = True
            return outcome
        except httpx.TransportError as error:
            outcome.error = repr(error)
        if not idempotency_key:
            return outcome
        outcome.error = ""
        outcome.num_resumed += 1
        time.sleep(_AGAIN_S)
    outcome.error = "refused for too long"
    return outcome


def _read(response: httpx.Response, outcome: Outcome, last_s: float, begun: threading.Event) -> float:
    """`last_s`: when the request was sent, or its last event came; returns that of the last one now."""
    if response.status_code != httpx.codes.OK:
        outcome.error = f"{response.status_code} {response.read().decode()}"
        return last_s
    data = event_id = ""
    for line in response.iter_lines():
        gap_s = time.monotonic() - last_s
        outcome.longest_gap_s = max(outcome.longest_gap_s, gap_s)
        if gap_s > HUNG_S:  # although comments keep the connection alive
            outcome.is_hung = True
            return last_s
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif not line and data:
            last_s = time.monotonic()
            outcome.take(data)
            outcome.event_id, data = event_id or outcome.event_id, ""
            begun.set()
    return last_s
