"""The load: wrk on loopback, and the CPU time that each process spends under it."""

import dataclasses
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.serving_plane.stacks import Running
from tests.stack import MODEL

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WARM_UP_S = 2
_MESSAGE = "Hey, quick check: is everything up and running?"
_TO_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


@dataclasses.dataclass(frozen=True)
class Row:
    """`num_connections` closed-loop clients whose answers have `num_tokens` tokens. `is_own`: only Baton has
    this plane."""

    name: str
    num_connections: int
    num_tokens: int
    streams: bool
    plane: str = "tcp"
    step_ms: float = 0.0
    is_own: bool = False


ROWS: Final = [
    Row("1 connection, 8 tokens", 1, 8, streams=False),
    Row("32 connections, 8 tokens", 32, 8, streams=False),
    Row("32 connections, 128 tokens", 32, 128, streams=False),
    Row("32 streams, 128 tokens", 32, 128, streams=True),
    Row("128 streams, 256 tokens", 128, 256, streams=True),
    Row("32 streams, 128 tokens, steps of 2 ms", 32, 128, streams=True, step_ms=2.0),
    Row("32 streams, 128 tokens, NATS", 32, 128, streams=True, plane="nats", is_own=True),
]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Latencies are of whole answers."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    num_failed: int
    cpu_us_per_request: dict[str, float]

    def as_json(self) -> dict[str, object]:
        """Rounded to what is significant."""
        cpu = {name: round(us, 1) for name, us in self.cpu_us_per_request.items()}
        return {**dataclasses.asdict(self), "cpu_us_per_request": cpu}


def measure(row: Row, running: Running, seconds: int) -> Measured:
    """One row, after a warm-up."""
    _wrk(row, running.url, _WARM_UP_S)
    before = {name: _cpu_s(pid) for name, pid in running.pids.items()}
    output = _wrk(row, running.url, seconds)
    spent = {name: _cpu_s(pid) - before[name] for name, pid in running.pids.items()}
    num_requests = int(_found(r"(\d+) requests in", output))
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", output)
    return Measured(
        requests_per_s=float(_found(r"Requests/sec:\s+([\d.]+)", output)),
        p50_ms=_latency_ms("50%", output),
        p99_ms=_latency_ms("99%", output),
        num_failed=int(failed[1]) if failed else 0,
        cpu_us_per_request={name: s * 1e6 / num_requests for name, s in spent.items()},
    )


def _wrk(row: Row, url: str, seconds: int) -> str:
    streams = "true" if row.streams else "false"
    body = (
        f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"{_MESSAGE}"}}],'
        f'"max_tokens":{row.num_tokens},"ignore_eos":true,"stream":{streams}}}'
    )
    script = 'wrk.method="POST"; wrk.headers["content-type"]="application/json"\n' + f"wrk.body='{body}'\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "load.lua"
        path.write_text(script)
        command = ["wrk", "-t1", f"-c{row.num_connections}", f"-d{seconds}s", "--timeout", "30s", "--latency"]
        command += ["-s", str(path), f"{url}/v1/chat/completions"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _cpu_s(pid: int) -> float:
    """User and system time of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S + sum(_cpu_s(int(child)) for child in children)


def _found(pattern: str, output: str) -> str:
    found = re.search(pattern, output)
    assert found, f"wrk printed no {pattern}:\n{output}"
    return found[1]


def _latency_ms(percentile: str, output: str) -> float:
    found = re.search(rf"{percentile}\s+([\d.]+)(us|ms|s|m)\b", output)
    assert found, f"wrk printed no {percentile}:\n{output}"
    return float(found[1]) * _TO_MS[found[2]]
