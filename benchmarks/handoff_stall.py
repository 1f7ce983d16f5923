"""How long running answers stand still while KV is handed over beside them, on two GPUs.

`python benchmarks/handoff_stall.py [--size 20b] [--engines JSON;JSON] [--ways apart,aggregated] [--cached]
[--spy FOLDER]` adds to benchmarks/results/handoff_stall_20b.json: the first token's time of a prompt alone,
and apart the gaps between the tokens of eight running answers without handoffs, and with one at a time of
2,000, 12,000 and 32,000 tokens. `--engines` are engine arguments that the workers are started with in turn;
`--cached`: prefill has computed the prompts before, so that two workers can share a GPU; `--spy` samples the
stacks of vLLM's processes (needs py-spy). Weights are random. Needs what `vllm_aiperf.py` needs.

Some counts are medians over the streams: random tokens may make no whole character for a while, and then one
stream pauses alone. When decode stands still, all do."""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import vllm_aiperf as servers
from benchmarks.agent_turns import ENGINE, VOCABULARY, ask, quantile_ms, request
from tests.gpu import random_weights
from tests.gpu.dummy_model import write_dummy_model
from tests.gpu.vllm_scene import gpus

ROOT = Path(__file__).parents[1]
NUM_STREAMS = 8
HANDED_OVER = (0, 2000, 12_000, 32_000)
ALONE = (1000, 4000, 12_000, 32_000)
NUM_ALONE = 7
TOKENS_PER_S = 300  # more than a stream generates, so that none ends early
PAUSE_S = 0.3


def new_prompt(num_tokens: int) -> list[int]:
    """One that no cache holds."""
    return [random.randrange(*VOCABULARY) for _ in range(num_tokens)]


def new_request(num_tokens: int, num_answer: int) -> bytes:
    """With a new prompt."""
    return request(new_prompt(num_tokens), num_answer)


async def gaps(
    url: str, num_tokens: int, seconds: float, *, cached: bool, spy: Path | None = None
) -> dict[str, Any]:
    """The gaps of the running answers while prompts of `num_tokens` are handed over; 0: none are."""
    prompts = [new_prompt(num_tokens) for _ in range(1 + int(seconds / PAUSE_S))]
    requests = [request(prompt, 2) for prompt in prompts]  # not while it measures
    if num_tokens and cached:
        for prompt in prompts:
            await ask(url, request(prompt, 1))  # decode gets no answer of one token
    streams: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    num_answer = int(TOKENS_PER_S * (seconds + 2))
    running = [asyncio.create_task(ask(url, new_request(500, num_answer), times)) for times in streams]
    while not all(len(times) > 100 for times in streams):  # noqa: ASYNC110  simple, and not measured
        await asyncio.sleep(0.1)
    spies = spying(spy, seconds) if spy else []
    began, handoffs = time.perf_counter(), list[tuple[float, float]]()
    while time.perf_counter() - began < seconds:
        if num_tokens:
            sent = time.perf_counter()
            handoffs.append((sent, (await ask(url, requests.pop()))["ttft"]))
        await asyncio.sleep(PAUSE_S)
    ended = time.perf_counter()
    if any(task.done() for task in running):
        raise RuntimeError("a stream ended before the measurement did")
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for process in spies:
        process.wait(60)
    of_streams = [[b - a for a, b in itertools.pairwise(times) if began < b < ended] for times in streams]
    return {
        "handed_over_tokens": num_tokens,
        **figures(of_streams, [ttft for _, ttft in handoffs]),
        "longest_of_each": [longest_beside(streams[0], *handoff) for handoff in handoffs],
    }


def longest_beside(times: list[float], sent: float, ttft: float) -> list[dict[str, float]]:
    """A stream's three longest gaps during a handoff: when they ended, before or after its first token."""
    beside = [(b - a, b) for a, b in itertools.pairwise(times) if sent < b < sent + ttft + PAUSE_S]
    return [
        {
            "gap_ms": round(1e3 * gap, 1),
            "sent_ms": round(1e3 * (end - sent)),
            "first_token_ms": round(1e3 * (end - sent - ttft)),
        }
        for gap, end in sorted(beside, reverse=True)[:3]
    ]


def figures(of_streams: list[list[float]], ttfts: list[float]) -> dict[str, Any]:
    """Of the streams' gaps and the handoffs' first tokens, in seconds."""
    values = [value for values in of_streams for value in values]
    limit_s = 3 * statistics.median(values)
    num_long = statistics.median(sum(value > limit_s for value in values) for values in of_streams)
    return {
        "handoffs": len(ttfts),
        "itl_p50_ms": quantile_ms(values, 0.5),
        "itl_p99_ms": quantile_ms(values, 0.99),
        "longest_gap_p50_ms": quantile_ms([max(values) for values in of_streams], 0.5),
        "longest_gap_ms": quantile_ms(values, 1),
        "gaps_over_3_p50_per_handoff": round(num_long / max(1, len(ttfts)), 2),
        "ttft_p50_ms": quantile_ms(ttfts, 0.5) if ttfts else None,
    }


async def alone(url: str, num_tokens: int) -> dict[str, Any]:
    """The first token's time of a prompt beside which nothing runs."""
    ttfts = [(await ask(url, new_request(num_tokens, 2)))["ttft"] for _ in range(NUM_ALONE)]
    return {"alone_tokens": num_tokens, "ttft_p50_ms": quantile_ms(ttfts, 0.5)}


def spying(folder: Path, seconds: float) -> list[subprocess.Popen[bytes]]:
    """Begin to sample the stacks of vLLM's processes into `folder`."""
    found = subprocess.run(["pgrep", "-f", "EngineCore"], capture_output=True, text=True, check=False)
    command = f"py-spy record -r 400 -d {seconds:.0f} -f raw -t"
    return [
        subprocess.Popen(
            [*command.split(), "-o", f"{folder}/{pid}.raw", "--pid", pid], stdout=subprocess.DEVNULL
        )
        for pid in found.stdout.split()
    ]


def measured(url: str, way: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of one way and set of engine arguments."""
    spy, seconds, cached = options.spy, options.seconds, options.cached
    for num_tokens in ALONE:
        asyncio.run(ask(url, new_request(num_tokens, 2)))  # the connection is made with the first handoff
        yield asyncio.run(alone(url, num_tokens))
    if way != "apart":
        return
    for num_tokens in HANDED_OVER:
        yield asyncio.run(gaps(url, num_tokens, seconds, cached=cached))
    if spy is not None:
        yield {"sampled": True} | asyncio.run(gaps(url, HANDED_OVER[-1], seconds, cached=cached, spy=spy))


def main() -> None:
    """Measure each set of engine arguments; each result is written at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="20b", choices=["20b", "120b"])
    parser.add_argument("--engines", default="{}", help="sets of engine arguments, JSON, separated by ;")
    parser.add_argument("--ways", default="apart")
    parser.add_argument("--cached", action="store_true", help="prefill has computed the prompts before")
    parser.add_argument("--spy", type=Path, help="folder for stacks")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each row")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    file = options.results / f"handoff_stall_{options.size}.json"
    results = json.loads(file.read_text()) if file.is_file() else {"runs": []}
    results |= {
        "hardware": gpus()[: servers.NUM_GPUS],
        "versions": {name: version(name) for name in ("torch", "vllm", "nixl-cu13")},
    }
    os.environ["LOCAL_PREFILL_TOKENS"] = "0"  # every prompt is handed over
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_dummy_model(Path(scratch) / f"gpt-oss-{options.size}", options.size)
        plugin = random_weights.install(Path(scratch) / "plugin")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])
        for override, way in itertools.product(options.engines.split(";"), options.ways.split(",")):
            engine = ENGINE | json.loads(override)
            engines = dict.fromkeys(("PREFILL_EXTRA_FLAGS", "DECODE_EXTRA_FLAGS", "EXTRA_FLAGS"), engine)
            run: dict[str, Any] = {
                "way": way,
                "engine": json.loads(override),
                "cached": options.cached,
                "rows": [],
            }
            results["runs"].append(run)
            arguments = [] if way == "apart" else ["--agg"]
            with servers.baton(folder, options.size, *arguments, engines=engines) as (urls, _):
                for row in measured(urls[0], way, options):
                    print(json.dumps({"way": way} | run["engine"] | row), flush=True)
                    run["rows"].append(row)
                    file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
