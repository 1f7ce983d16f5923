"""Releasing KV, in batches and inside vLLM's processes; and how these end with Baton's worker."""

import asyncio
import itertools
import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer import Connector, set_kv_transfer_group
from workers.engines.vllm.pins import Releases

from tests.clock import jumping
from tests.waiting import PATIENCE_S, until
from workers.engines.vllm.inside import NOTICE_S, KvPins, shorten_leases
from workers.engines.vllm.settings import LEASE_S

ROOT = Path(__file__).parents[2]


def test_leases_that_are_shortened_come_first_and_none_gets_longer() -> None:
    now = time.perf_counter()
    leases = {"old": now + 0.5, "a": now + 30, "b": now + 40, "c": now + 50}

    shorten_leases(leases, ["c", "gone", "old"])

    assert list(leases) == ["old", "c", "a", "b"]
    assert leases["old"] == now + 0.5
    assert leases["c"] == pytest.approx(now + NOTICE_S, abs=1)


def test_requests_are_found_by_the_id_that_vllm_was_given() -> None:
    connector = Connector()
    set_kv_transfer_group(connector)
    books = connector.connector_worker
    far = time.perf_counter() + 30
    books._reqs_to_send |= {"r-1-0a0b0c0d": far, "r-10-0a0b0c0d": far, "plain": far}  # noqa: SLF001  as NIXL names them
    books._reqs_to_process |= {*books._reqs_to_send, "r-2-0a0b0c0d"}  # noqa: SLF001  tests only

    again = KvPins().release_kv(["r-1", "r-2", "r-3", "plain"])

    assert again == ["r-2"]  # its lease begins with the next step
    shortened = {i for i, end in books._reqs_to_send.items() if end < far}  # noqa: SLF001  as NIXL names them
    assert shortened == {"r-1-0a0b0c0d", "plain"}


def test_a_process_without_a_connector_has_nothing_to_release() -> None:
    with ThreadPoolExecutor() as thread:  # a process of its own, as the double has it
        assert thread.submit(KvPins().release_kv, ["r-1"]).result() == []


class Llm:
    """Records what is released; answers when allowed."""

    def __init__(self, *answers: list[str] | Exception) -> None:
        self.asked: list[list[str]] = []
        self.asked_at_s: list[float] = []
        self.limits_s: list[float | None] = []
        self.may_answer = asyncio.Event()
        self._answers = list(answers)

    async def collective_rpc(self, method: str, *, args: tuple[list[str]], **options: float) -> Any:
        assert method == "release_kv"
        self.asked.append(args[0])
        self.asked_at_s.append(asyncio.get_running_loop().time())
        self.limits_s.append(options.get("timeout"))
        await self.may_answer.wait()
        answer = self._answers.pop(0) if self._answers else []
        if isinstance(answer, Exception):
            raise answer
        return [answer, None]


async def released(llm: Llm, releases: Releases, num_messages: int) -> None:
    await until(lambda: len(llm.asked) >= num_messages)
    llm.may_answer.set()


async def test_pins_that_come_while_vllm_answers_go_with_the_next_message() -> None:
    llm, releases = Llm(), Releases()
    releases.add(llm, "a")
    await asyncio.sleep(0)  # the message has been sent
    for request_id in ("b", "c"):
        releases.add(llm, request_id)
    await released(llm, releases, 1)
    await released(llm, releases, 2)
    assert llm.asked == [["a"], ["b", "c"]]
    assert all(limit_s is not None and limit_s < LEASE_S for limit_s in llm.limits_s)


@jumping
async def test_a_worker_stops_while_vllm_does_not_answer() -> None:
    llm, releases = Llm(), Releases()
    await releases.stop()  # no pin was ever released
    releases.add(llm, "a")
    await until(lambda: llm.asked)
    releases.add(llm, "b")
    await releases.stop()
    assert llm.asked == [["a"]]
    assert "release-kv" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_a_pin_without_a_lease_is_asked_for_again() -> None:
    llm, releases = Llm(["a"]), Releases()
    llm.may_answer.set()
    releases.add(llm, "a")
    releases.add(llm, "b")
    await released(llm, releases, 2)
    assert llm.asked == [["a", "b"], ["a"]]


async def test_an_engine_that_does_not_answer_costs_the_lease_and_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm, releases = Llm(TimeoutError()), Releases()
    llm.may_answer.set()
    releases.add(llm, "a")
    await released(llm, releases, 1)
    releases.add(llm, "b")
    await released(llm, releases, 2)
    await releases.stop()
    assert llm.asked == [["a"], ["b"]]
    assert "pins not released num=1" in caplog.text


@jumping
async def test_pins_that_came_while_an_engine_did_not_answer_are_released_next() -> None:
    llm, releases = Llm(TimeoutError()), Releases()
    releases.add(llm, "a")
    await until(lambda: llm.asked)
    releases.add(llm, "b")
    await released(llm, releases, 1)
    await released(llm, releases, 2)
    assert llm.asked == [["a"], ["b"]]


# A worker, vLLM's core under it, and a GPU worker under that, each with the extension loaded.
_TREE = """
import importlib, os, subprocess, sys, time
depth = int(sys.argv[1])
if depth == 2:
    os.environ["BATON_WORKER_PID"] = str(os.getpid())
importlib.import_module("workers.engines.vllm.inside")
print(os.getpid(), flush=True)
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2]])
time.sleep(60)  # until it is killed, at most
"""


def test_a_killed_worker_takes_vllms_processes_with_it() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", _TREE, "2", _TREE], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    try:
        assert worker.stdout is not None
        _, *below = [int(worker.stdout.readline()) for _ in range(3)]
        ends = [os.pidfd_open(pid) for pid in below]
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()

    for end in ends:
        assert select.select([end], [], [], 10)[0], "a process of vLLM's outlives its worker"
        os.close(end)
    worker.stdout.close()


@jumping
async def test_a_pin_whose_lease_never_begins_is_left_to_it() -> None:
    llm, releases = Llm(*([["a"]] * 100)), Releases()
    llm.may_answer.set()
    releases.add(llm, "a")
    await asyncio.sleep(60)  # in the clock of the test
    assert len(llm.asked) == 40
    assert min(b - a for a, b in itertools.pairwise(llm.asked_at_s)) > 0.01  # a step of vLLM's
    await releases.stop()


def run_inside(code: str, worker_pid: int) -> subprocess.CompletedProcess[str]:
    """Run this where Baton's worker has that id."""
    environ = os.environ | {"BATON_WORKER_PID": str(worker_pid)}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def ended_process() -> int:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    return ended.pid


_END = "from workers.engines.vllm.inside import _end_with; _end_with({}, {}); print('it lives')"


def test_a_process_of_a_worker_that_has_ended_ends_itself_and_no_stranger() -> None:
    ended = ended_process()
    with subprocess.Popen(["sleep", "60"]) as stranger:  # once it was the parent's id
        for parent in (ended, stranger.pid):
            assert run_inside(_END.format(ended, parent), os.getpid()).returncode == -signal.SIGKILL
        assert stranger.poll() is None
        stranger.kill()


def test_the_core_above_ends_with_the_worker_even_if_it_hangs() -> None:
    line = f"{sys.executable} -c 'import workers.engines.vllm.inside, time; time.sleep(60)' & wait"
    environ = os.environ | {"BATON_WORKER_PID": str(ended_process())}
    core = subprocess.run(["sh", "-c", line], env=environ, cwd=ROOT, check=False, timeout=PATIENCE_S)
    assert core.returncode == -signal.SIGKILL


_STATE = """
import os, sys, threading
from workers.engines.vllm import kernels
kernels.pass_strides = lambda: print("strides")
{}
import workers.engines.vllm.inside
print(sys.getswitchinterval(), [t.daemon for t in threading.enumerate() if t.name == "end-with-worker"])
"""


def test_only_vllms_own_processes_are_changed() -> None:
    assert run_inside(_STATE.format(""), os.getpid()).stdout == "strides\n0.0005 [True]\n"
    itself = _STATE.format('os.environ["BATON_WORKER_PID"] = str(os.getpid())')
    assert run_inside(itself, os.getpid()).stdout == "0.005 []\n"
