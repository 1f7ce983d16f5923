"""Streamed completions of a stack, read event by event."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.stack import MODEL, Stack
from tests.waiting import PATIENCE_S

# Long enough to be killed in the middle; ENDLESS for streams that are never read to the end.
LONG = 150
ENDLESS = 20_000


class Stream:
    """A streamed completion, read event by event."""

    def __init__(
        self, stack: Stack, num_tokens: int = LONG, prompt: str = "one two three", **body: Any
    ) -> None:
        body = {"max_tokens": num_tokens, "stream": True, "temperature": 0} | body
        body |= {"model": MODEL, "prompt": prompt}
        # Without certificates, which take 45 ms of CPU to load.
        self._client = httpx.Client(timeout=PATIENCE_S, verify=False)
        self._context = self._client.stream("POST", f"{stack.url}/v1/completions", json=body)
        self.response = self._context.__enter__()
        self._lines = self.response.iter_lines()
        self.text = ""
        self.finish_reason: str | None = None
        self.error: dict[str, str] | None = None
        self.done = False
        self.num_tokens = 0  # if its usage was asked for
        self.longest_gap_s = 0.0
        self._last_s = time.monotonic()
        stack.closing.append(self.close)

    def read(self, num_events: int | None = None) -> "Stream":
        """The next events, or all remaining ones."""
        while num_events is None or num_events > 0:
            line = next(self._lines, None)
            if line is None:
                break
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                self.done = True
                continue
            self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - self._last_s)
            self._last_s = time.monotonic()
            event = json.loads(line.removeprefix("data: "))
            if num_events is not None:
                num_events -= 1
            self.error = event.get("error", self.error)
            self.num_tokens = (event.get("usage") or {}).get("completion_tokens", 0)
            for choice in event.get("choices", []):
                self.text += choice["text"]
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return self

    def close(self) -> None:
        self._context.__exit__(None, None, None)
        self._client.close()


def whole_answer(stack: Stack, num_tokens: int = LONG, prompt: str = "one two three") -> str:
    stream = Stream(stack, num_tokens, prompt).read()
    assert (stream.finish_reason, stream.error, stream.done) == ("length", None, True)
    return stream.text


def read_all(streams: list[Stream], expected: str) -> float:
    """Read all streams to their ends at once, which must be those of an undisturbed run; returns the longest
    gap between two events, in seconds."""
    with ThreadPoolExecutor(len(streams)) as pool:
        list(pool.map(Stream.read, streams))
    ends = [(stream.text, stream.finish_reason, stream.error) for stream in streams]
    assert ends == [(expected, "length", None)] * len(streams)
    return max(stream.longest_gap_s for stream in streams)


def num_attempts(stack: Stack, prompt: str) -> int:
    """How many attempts a request takes."""
    request_id = Stream(stack, prompt=prompt).read().response.headers["x-request-id"]
    (found,) = stack.get(f"/requests?id={request_id}").json()["requests"]
    (leg,) = found["record"]["legs"]
    return len(leg["attempts"])
