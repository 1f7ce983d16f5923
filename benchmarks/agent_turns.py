"""What a turn of a tool-calling conversation costs on two GPUs, in three ways.

`python benchmarks/agent_turns.py [--size 20b] [--ways apart,aggregated,vllm] [--frontends FLAGS;FLAGS]` adds
to benchmarks/results/agent_turns_20b.json: Baton with prefill and decode apart, two aggregated workers, and
`vllm serve` twice, each conversation at one server. Weights are random, prefix caches on. A conversation has
a system part that all share, its own beginning, then turns that each add tokens to the last prompt.

`--frontends` are sets of frontend flags that are tried in turn over the same workers. Needs what
`vllm_aiperf.py` needs."""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import itertools

from benchmarks import vllm_aiperf as servers
from tests.conftest import free_port
from tests.gpu import random_weights
from tests.gpu.dummy_model import write_dummy_model
from tests.gpu.vllm_scene import gpus

ROOT = Path(__file__).parents[1]
ENGINE = {name: value for name, value in servers.ENGINE.items() if name != "enable_prefix_caching"}
WAYS = ("apart", "aggregated", "vllm")
VOCABULARY = (1000, 190_000)
_COUNTED = re.compile(
    r"^baton_(prefills_total|prefix_routes_total|kv_moved_bytes|num_(?:\w+_tokens|handoffs))(\{.*\}) (\S+)$",
    re.MULTILINE,
)


class Conversations:
    """The load: `options.conversations` at once, each with its own random tokens."""

    def __init__(self, urls: list[str], options: argparse.Namespace, seed: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self._urls = urls
        self._options = options
        self._seed = seed

    async def run(self, num_conversations: int, num_turns: int, think_s: float) -> float:
        """Hold them all to their end; how many seconds that took."""
        turns = [self._requests(n, num_turns) for n in range(num_conversations)]  # not while it measures
        began = time.perf_counter()
        await asyncio.gather(*(self._hold(n, asked, think_s) for n, asked in enumerate(turns)))
        return time.perf_counter() - began

    def _requests(self, number: int, num_turns: int) -> list[tuple[int, bytes]]:
        """A conversation's turns: the prompt's length, and what is sent."""
        options, draw = self._options, random.Random(f"{self._seed} {number}")

        def tokens(num_tokens: int, of: random.Random = draw) -> list[int]:
            return [of.randrange(*VOCABULARY) for _ in range(num_tokens)]

        ids, turns = tokens(options.system, random.Random(7)) + tokens(options.first), []
        for _ in range(num_turns):
            turns.append((len(ids), request(ids, options.answer)))
            ids += tokens(options.answer + options.more)
        return turns

    async def _hold(self, number: int, turns: list[tuple[int, bytes]], think_s: float) -> None:
        pause, url = random.Random(number), self._urls[number % len(self._urls)]  # the same in each run
        await asyncio.sleep(pause.random() * think_s * 2)  # they do not begin at once
        for turn, (num_tokens, sent) in enumerate(turns):
            self.rows.append({"turn": turn, "prompt": num_tokens, **await ask(url, sent)})
            await asyncio.sleep(pause.expovariate(1 / think_s))  # the tool runs


def request(token_ids: list[int], num_tokens: int) -> bytes:
    """A streamed completion of `num_tokens`, as sent. Writing 32,000 token ids takes 10 ms."""
    asked = {"model": servers.MODEL, "prompt": token_ids, "max_tokens": num_tokens, "stream": True}
    body = json.dumps(asked | {"ignore_eos": True, "temperature": 0}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(url: str, sent: bytes, times: list[float] | None = None) -> dict[str, Any]:
    """The answer to a `request`: seconds to its first event, between events, and in all. `times`: where to
    put when each event came."""
    times = [] if times is None else times
    host, port = url.removeprefix("http://").split(":")
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    writer.write(sent)
    try:
        status = await reader.readline()
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                if line.startswith(b'data: {"error"'):
                    raise RuntimeError(line[:300])
    finally:
        writer.close()
    if b"200" not in status or not times:
        raise RuntimeError(f"{url} answered {status!r} with {len(times)} events")
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return {"ttft": times[0] - began, "itl": gaps, "total": times[-1] - began}


def quantile_ms(values: list[float], share: float) -> float:
    """That quantile of `values`, which are in seconds."""
    return round(1e3 * sorted(values)[min(len(values) - 1, int(share * len(values)))], 1)


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Quantiles in milliseconds."""
    gaps = [gap for row in rows for gap in row["itl"]]

    return {
        "requests": len(rows),
        "prompt_mean": round(statistics.mean(row["prompt"] for row in rows)),
        **{f"ttft_p{p}_ms": quantile_ms([row["ttft"] for row in rows], p / 100) for p in (50, 90, 99)},
        **{f"itl_p{p}_ms": quantile_ms(gaps, p / 100) for p in (50, 99)},
        "longest_gap_p50_ms": quantile_ms([max(row["itl"]) for row in rows if row["itl"]], 0.5),
        "turn_p50_ms": quantile_ms([row["total"] for row in rows], 0.5),
    }


def measured(urls: list[str], options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Warm up, then hold all conversations; the figures of first and later turns."""
    asyncio.run(Conversations(urls, options, seed + 1000).run(8, 2, 0.2))
    load = Conversations(urls, options, seed)
    before = counters(urls[0])
    took_s = asyncio.run(load.run(options.conversations, options.turns, options.think_s))
    first, later = ([row for row in load.rows if bool(row["turn"]) == is_later] for is_later in (False, True))
    after = counters(urls[0])
    return {
        "seconds": round(took_s, 1),
        "output_tokens_per_s": round(len(load.rows) * options.answer / took_s),
        "first_turn": figures(first),
        "later_turns": figures(later),
        "counters": {name: after[name] - before.get(name, 0) for name in after},
    }


def counters(url: str) -> dict[str, float]:
    """Baton's counters of prefills, routes and KV; none for other servers."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        return {name + labels: float(value) for name, labels, value in _COUNTED.findall(page.read().decode())}


@contextlib.contextmanager
def frontend(folder: Path, flags: str) -> Iterator[str]:
    """Another frontend of the same workers, ready: its URL."""
    port = free_port()
    command = f"python -m frontend --http-port {port} --model-path {folder} {flags}"
    with tempfile.TemporaryFile("w+") as log, servers.running(shlex.split(command), {}, log) as process:
        servers.wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"


def way(name: str, folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start the servers and yield a result for each set of frontend flags."""
    roles = {
        "PREFILL_EXTRA_FLAGS": options.prefill_engine,
        "DECODE_EXTRA_FLAGS": options.decode_engine,
        "EXTRA_FLAGS": "{}",
    }
    engines = {role: ENGINE | json.loads(override) for role, override in roles.items()}
    started: dict[str, Callable[[], AbstractContextManager[tuple[list[str], str]]]] = {
        "apart": lambda: servers.baton(folder, options.size, engines=engines),
        "aggregated": lambda: servers.baton(folder, options.size, "--agg", engines=engines),
        "vllm": lambda: servers.vllm_serve(folder, prefix_caching=True),
    }
    began = time.monotonic()
    with started[name]() as (urls, command):
        shared = {"way": name, "command": command, "load_s": round(time.monotonic() - began, 1)}
        yield {**shared, **measured(urls, options, seed=0)}
        for number, flags in enumerate(options.frontends.split(";") if options.frontends else (), 1):
            with frontend(folder, flags) as url:
                yield {**shared, "frontend": flags, **measured([url], options, seed=10_000 * number)}


def main() -> None:
    """Measure the ways in turn; each result is written at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="20b", choices=["20b", "120b"])
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--frontends", default="", help="further sets of flags, separated by ;")
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}-engine", default="{}", help="engine arguments, JSON")
    sizes = {"system": 2000, "first": 6000, "more": 800, "answer": 100, "turns": 8, "conversations": 48}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--think-s", type=float, default=1.0)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    file = options.results / f"agent_turns_{options.size}.json"
    results = json.loads(file.read_text()) if file.is_file() else {"runs": []}
    results |= {
        "hardware": gpus()[: servers.NUM_GPUS],
        "versions": {name: version(name) for name in ("torch", "vllm", "nixl-cu13")},
    }
    load = {name: getattr(options, name) for name in (*sizes, "think_s")}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_dummy_model(Path(scratch) / f"gpt-oss-{options.size}", options.size)
        plugin = random_weights.install(Path(scratch) / "plugin")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])
        os.environ |= {
            "BATON_DISCOVERY_BACKEND": "file",
            "BATON_FILE_REGISTRY": f"{scratch}/registry",
            "BATON_REQUEST_PLANE": "tcp",
        }
        for name in options.ways.split(","):
            for result in way(name, folder, options):
                print(json.dumps(result), flush=True)
                results["runs"].append({"load": load, **result})
                file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
