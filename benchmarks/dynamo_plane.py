"""CPU per token of Baton's frontend over Dynamo's mockers, beside Dynamo's frontend over the same workers.

    python -m benchmarks.dynamo_plane [--rounds 3] [--streams 32] [--tokens 128] [--requests 256]
                                      [--num-processes 1]

Needs .venv-dynamo (`make bench PEER=dynamo` or `make test-dynamo` makes it). The frontends take turns; each
figure is the median of the rounds. `event_loop_us` is the part of the thread with Python's event loop,
`runtime_us` that of the others, which are Dynamo's. Figures go to benchmarks/results/dynamo_plane.json."""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.conftest import free_port
from tests.dynamo_stack import DynamoStack, templated_model
from tests.stack import MODEL, Process
from tests.waiting import wait_for

_RESULTS = Path(__file__).parent / "results/dynamo_plane.json"
_PYTHON = Path(".venv-dynamo/bin/python")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
Spent = dict[str, float]


def spent_s(pids: list[int]) -> Spent:
    """CPU seconds of the processes so far: of their first threads, and of the others."""
    found = {"event_loop": 0.0, "runtime": 0.0}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            kind = "event_loop" if task.name == str(pid) else "runtime"
            found[kind] += (int(fields[11]) + int(fields[12])) * _TICK_S
    return found


def tree(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in tree(int(child)))]


async def load(url: str, options: argparse.Namespace) -> float:
    """So many streamed chats at a time; the seconds they took."""
    body = {"model": MODEL, "stream": True, "max_tokens": options.tokens, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": "Tell me a story."}]
    left = iter(range(options.requests))
    limits = httpx.Limits(max_connections=options.streams, max_keepalive_connections=options.streams)

    async def one(client: httpx.AsyncClient) -> None:
        for _ in left:
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                last = b""
                async for data in answer.aiter_raw():
                    last = data
                assert answer.status_code == 200
                assert b"[DONE]" in last

    began_s = time.monotonic()
    async with httpx.AsyncClient(timeout=300, limits=limits, verify=False) as client:
        await asyncio.gather(*(one(client) for _ in range(options.streams)))
    return time.monotonic() - began_s


def measured(url: str, pid: int, options: argparse.Namespace) -> Spent:
    """CPU microseconds per token of one frontend in one round."""
    pids = tree(pid)
    before = spent_s(pids)
    seconds = asyncio.run(load(url, options))
    num_tokens = options.requests * options.tokens
    found = {f"{name}_us": (s - before[name]) / num_tokens * 1e6 for name, s in spent_s(pids).items()}
    return found | {"all_us": sum(found.values()), "tokens_per_s": num_tokens / seconds}


def frontends(stack: DynamoStack, options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Start mockers and both frontends: the name, URL and pid of each frontend."""
    wires = ["--discovery-backend", "file", "--request-plane", "tcp"]
    mocker = ["dynamo.mocker", "--model-path", str(templated_model(stack.folder)), "--model-name", MODEL]
    mocker += [*wires, "--speedup-ratio"]
    mocker += [options.speedup, "--max-num-seqs", "1024", "--num-gpu-blocks-override", "200000"]
    mocker += ["--no-enable-prefix-caching", "--disaggregation-mode"]
    port = free_port()
    theirs = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *wires]
    started = {}
    for name, command in (("p", [*mocker, "prefill"]), ("d", [*mocker, "decode"]), ("dynamo", theirs)):
        log = stack.folder / f"{name}.log"
        started[name] = Process(name, [str(_PYTHON), "-m", *command], log, stack.environ)
        stack.processes.append(started[name])
    ours = stack.frontend("--num-processes", str(options.num_processes), "--log-level", "warning")
    stack.wait_ready(1, 1)
    wait_for(lambda: MODEL in httpx.get(f"http://127.0.0.1:{port}/v1/models").text)
    yield "baton", stack.url, ours.popen.pid
    yield "dynamo", f"http://127.0.0.1:{port}", started["dynamo"].popen.pid


def main() -> None:
    """Print each round, then write the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("rounds", 3), ("streams", 32), ("tokens", 128), ("requests", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--num-processes", type=int, default=1, help="of Baton's frontend")
    parser.add_argument("--speedup", default="10", help="of the mocker's steps, 7 ms by default")
    options = parser.parse_args()
    rounds: dict[str, list[Spent]] = {"baton": [], "dynamo": []}
    with tempfile.TemporaryDirectory() as folder, DynamoStack(Path(folder)) as stack:
        servers = list(frontends(stack, options))
        for number in range(options.rounds + 1):
            for name, url, pid in servers:
                found = measured(url, pid, options)
                print(number, name, {key: round(value, 1) for key, value in found.items()}, flush=True)
                if number:  # the first one warms up
                    rounds[name].append(found)
    medians = {
        name: {key: round(statistics.median(each[key] for each in found), 1) for key in found[0]}
        for name, found in rounds.items()
    }
    print(json.dumps(medians, indent=2))
    _RESULTS.write_text(json.dumps({"options": vars(options), "medians": medians}, indent=2) + "\n")


if __name__ == "__main__":
    main()
