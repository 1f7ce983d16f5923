"""Speed of the serving plane: frontend and mocker workers under wrk, with the CPU time of each process.

    python -m benchmarks.serving_plane [--peer dynamo] [--num-processes 1] [--seconds 8] [--results FOLDER]

`make bench` runs it; PEER=dynamo runs NVIDIA Dynamo under the same load, in the same minutes. Needs wrk, etcd
and nats-server on the PATH."""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

from benchmarks.serving_plane.load import ROWS, Measured, Row, measure
from benchmarks.serving_plane.plot import svg
from benchmarks.serving_plane.stacks import Running, baton, dynamo

RESULTS = Path(__file__).parents[1] / "results"


def run(servers: list[str], seconds: int, num_processes: int) -> Iterator[tuple[str, Row, Measured]]:
    """Measure each row on one server after the other, so that a change of the machine's speed hits both."""
    start: dict[str, Callable[..., AbstractContextManager[Running]]] = {
        "baton": partial(baton, num_processes=num_processes),
        "dynamo": dynamo,
    }
    for plane, step_ms in dict.fromkeys((row.plane, row.step_ms) for row in ROWS):
        rows = [row for row in ROWS if (row.plane, row.step_ms) == (plane, step_ms)]
        with ExitStack() as stopping:
            running = {}
            for server in servers:
                if server == "baton" or not all(row.is_own for row in rows):
                    folder = Path(stopping.enter_context(tempfile.TemporaryDirectory()))
                    running[server] = stopping.enter_context(start[server](folder, plane, step_ms))
            for row in rows:
                for server, each in running.items():
                    yield server, row, measure(row, each, seconds)


def _line(server: str, row: Row, found: Measured) -> str:
    cpu = ", ".join(
        f"{name} {us / row.num_tokens:.1f}/token" if row.num_tokens > 8 else f"{name} {us:.0f}/request"
        for name, us in found.cpu_us_per_request.items()
    )
    return (
        f"{server:7} {row.name:38} {found.requests_per_s:8.0f} req/s  "
        f"p50 {found.p50_ms:7.2f} ms  p99 {found.p99_ms:7.2f} ms  CPU us: {cpu}"
    )


def _ratio(row: Row, ours: Measured, theirs: Measured) -> str:
    cpu = sum(ours.cpu_us_per_request.values()) / sum(theirs.cpu_us_per_request.values())
    return f"{row.name:38} requests {ours.requests_per_s / theirs.requests_per_s:5.2f}x  CPU {cpu:5.2f}x"


def main() -> None:
    """Print the table and the ratios; write JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=["dynamo"])
    parser.add_argument("--num-processes", type=int, default=1, help="of Baton's frontend")
    parser.add_argument("--seconds", type=int, default=8, help="per row, after two seconds of warm-up")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    servers = ["baton", options.peer] if options.peer else ["baton"]
    found: dict[str, dict[str, Measured]] = {server: {} for server in servers}
    for server, row, measured in run(servers, options.seconds, options.num_processes):
        found[server][row.name] = measured
        print(_line(server, row, measured), flush=True)
    if options.peer:
        print(f"\nbaton / {options.peer}")
        for row in ROWS:
            if row.name in found[options.peer]:
                print(_ratio(row, found["baton"][row.name], found[options.peer][row.name]))
    rows = {server: {name: each.as_json() for name, each in its.items()} for server, its in found.items()}
    command = " ".join(["python -m benchmarks.serving_plane", *sys.argv[1:]])
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    result = {"command": command, "machine": machine, "rows": rows}
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "serving_plane.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.results / "serving_plane.svg").write_text(svg(found))


if __name__ == "__main__":
    main()
