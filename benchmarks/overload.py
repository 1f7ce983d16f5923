"""Overload: goodput, refusals and fairness of small pools on loopback, with clients that obey Retry-After.

    python benchmarks/overload.py [--seconds 20] [--burst 2000] [--write benchmarks/results/overload.json]

Two prefill and two decode mockers; a request has a place for about 0.4 s. `capacity` is what twice as many
clients as there are places get, each with one request at a time; `overload` are three times as many new
requests a second; `burst` are all at once, with two of another API key a second later."""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
import benchmarks  # noqa: F401  checks the packages
from tests.stack import MODEL, Stack

NUM_PLACES = 8
POOL = {"max_batch_size": NUM_PLACES, "max_queue_size": 8, "decode_step_ms": 20}
NUM_WORKERS = 2  # of each role
NUM_TOKENS = 20
OVERLOAD = 3.0
WARM_UP_S = 2.0


class Try(msgspec.Struct):
    """One request. The first two times are since it was sent."""

    status: int
    head_s: float
    whole_s: float
    ended_s: float
    retry_after_s: int
    has_error_event: bool


class Client:
    """Sends requests with an API key; records all tries and, of each answer, their number and the time."""

    def __init__(self, url: str, key: str) -> None:
        self._port = int(url.rpartition(":")[2])
        body = {"model": MODEL, "prompt": "word " * 50, "max_tokens": NUM_TOKENS, "stream": True}
        data = json.dumps(body).encode()
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-type: application/json\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
        ) % (key.encode(), len(data), data)
        self.tries: list[Try] = []
        self.answers: list[tuple[int, float]] = []

    async def patient(self) -> None:
        """One request, tried until it is served."""
        began_s, num_tries = time.monotonic(), 1
        while (tried := await self._try()).status != 200:
            num_tries += 1
            await asyncio.sleep(tried.retry_after_s)
        self.answers.append((num_tries, time.monotonic() - began_s))

    async def _try(self) -> Try:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        began_s = time.monotonic()
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        head_s, body = time.monotonic() - began_s, await reader.read()
        writer.close()
        ended_s, status = time.monotonic(), int(head.split()[1])
        after = head.partition(b"retry-after: ")[2].partition(b"\r\n")[0]
        has_error_event = status == 200 and b'"error"' in body
        self.tries.append(Try(status, head_s, ended_s - began_s, ended_s, int(after or 0), has_error_event))
        return self.tries[-1]

    def goodput(self, began_s: float, seconds: float) -> float:
        """Whole answers a second."""
        whole = [t for t in self.tries if t.status == 200 and not t.has_error_event]
        return sum(began_s <= t.ended_s < began_s + seconds for t in whole) / seconds

    def figures(self) -> dict[str, object]:
        """What it saw."""
        refused = [t.whole_s for t in self.tries if t.status != 200]
        return {
            "num_answers": len(self.answers),
            "num_refusals": len(refused),
            "num_error_events": sum(t.has_error_event for t in self.tries),
            "tries": spread([num for num, _ in self.answers]),
            "latency_s": spread([s for _, s in self.answers]),
            "refused_after_s": spread(refused),
            "served_status_after_s": spread([t.head_s for t in self.tries if t.status == 200]),
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Quantiles."""
    ordered = sorted(values) or [0.0]
    at = {name: ordered[int(share * (len(ordered) - 1))] for name, share in (("p90", 0.9), ("p99", 0.99))}
    return {"p50": round(statistics.median(ordered), 4), **{name: round(v, 4) for name, v in at.items()}}


async def closed_loop(url: str, seconds: float) -> float:
    """Goodput of twice as many clients as there are places."""
    client, began_s = Client(url, "capacity"), time.monotonic() + WARM_UP_S

    async def loop() -> None:
        while time.monotonic() < began_s + seconds:
            await client.patient()

    await asyncio.gather(*(loop() for _ in range(2 * NUM_PLACES * NUM_WORKERS)))
    assert {t.status for t in client.tries} == {200}, "there is room for all of them"
    return client.goodput(began_s, seconds)


async def open_loop(url: str, rate: float, seconds: float) -> tuple[float, dict[str, object]]:
    """Goodput and figures of `rate` new requests a second."""
    client, began_s = Client(url, "overload"), time.monotonic()
    tasks: list[asyncio.Task[None]] = []
    while (passed_s := time.monotonic() - began_s) < WARM_UP_S + seconds:
        while len(tasks) < passed_s * rate:
            tasks.append(asyncio.create_task(client.patient()))
        await asyncio.sleep(0.005)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return client.goodput(began_s + WARM_UP_S, seconds), client.figures()


async def burst(url: str, num: int) -> dict[str, object]:
    """All at once, and a second later two requests of another key."""
    many, few, began_s = Client(url, "many"), Client(url, "few"), time.monotonic()
    flood = [asyncio.create_task(many.patient()) for _ in range(num)]
    await asyncio.sleep(1)
    await asyncio.gather(few.patient(), few.patient())
    await asyncio.gather(*flood)
    took_s = round(time.monotonic() - began_s, 2)
    return {"num_requests": num, "took_s": took_s, **many.figures(), "other_key": few.figures()}


async def measured(url: str, seconds: float, num_burst: int) -> dict[str, object]:
    """All figures."""
    capacity = await closed_loop(url, seconds)
    goodput, figures = await open_loop(url, OVERLOAD * capacity, seconds)
    return {
        "pool": {**POOL, "num_workers": NUM_WORKERS, "num_tokens": NUM_TOKENS},
        "capacity_per_s": round(capacity, 2),
        "overload": {"goodput_per_s": round(goodput, 2), "share": round(goodput / capacity, 4), **figures},
        "burst": await burst(url, num_burst),
    }


def main(args: argparse.Namespace) -> None:
    """Start the stack, measure, print."""
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "pool.yaml"
        pool.write_text(yaml.safe_dump(POOL))
        stack = Stack(Path(folder))
        try:
            stack.frontend()
            for mode in ("prefill", "decode") * NUM_WORKERS:
                stack.worker(mode, yaml=pool)
            stack.wait_ready(NUM_WORKERS, NUM_WORKERS)
            found = asyncio.run(measured(stack.url, args.seconds, args.burst))
        finally:
            stack.stop()
    text = json.dumps(found, indent=1)
    print(text)
    if args.write:
        args.write.write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--burst", type=int, default=2000)
    parser.add_argument("--write", type=Path)
    main(parser.parse_args())
