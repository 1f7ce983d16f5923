"""Inside vLLM's processes: how pins are released, and how the processes end with Baton's worker."""

import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm.distributed.kv_transfer import Connector, set_kv_transfer_group

from tests.waiting import PATIENCE_S
from workers.engines.vllm.patches.release import KvPins

ROOT = Path(__file__).parents[2]
WITH_VLLM = os.environ | {"PYTHONPATH": f"{ROOT / 'tests/doubles'}{os.pathsep}{ROOT}"}


def test_requests_are_found_by_the_id_that_vllm_was_given() -> None:
    connector = Connector()
    set_kv_transfer_group(connector)
    books = connector.connector_worker
    books._lease_extension, far = 80.0, time.perf_counter() + 120  # noqa: SLF001  decode's heartbeats: 20 s
    books._reqs_to_send |= {"r-1-0a0b0c0d": far, "r-10-0a0b0c0d": far, "plain": far}  # noqa: SLF001  as NIXL names them
    books._reqs_to_process |= {*books._reqs_to_send, "r-2-0a0b0c0d"}  # noqa: SLF001  tests only
    again = KvPins().release_kv(["r-1", "r-2", "r-3", "plain"])
    assert again == ["r-2"]  # its lease begins with the next step
    shortened = {i for i, end in books._reqs_to_send.items() if far - 90 < end < far - 80}  # noqa: SLF001  as NIXL names them
    assert shortened == {"r-1-0a0b0c0d", "plain"}  # a queue's next heartbeat is in time


def test_a_process_without_a_connector_has_nothing_to_release() -> None:
    with ThreadPoolExecutor() as thread:  # a process of its own, as the double has it
        assert thread.submit(KvPins().release_kv, ["r-1"]).result() == []


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
        [sys.executable, "-c", _TREE, "2", _TREE], stdout=subprocess.PIPE, cwd=ROOT, text=True, env=WITH_VLLM
    )
    try:
        assert worker.stdout is not None
        _, *below = [int(worker.stdout.readline()) for _ in range(3)]
        ends = [os.pidfd_open(pid) for pid in below]
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    for end in ends:
        assert select.select([end], [], [], PATIENCE_S)[0], "a process of vLLM's outlives its worker"
        os.close(end)
    worker.stdout.close()


def run_inside(code: str, worker_pid: int) -> subprocess.CompletedProcess[str]:
    """Run this where Baton's worker has that id."""
    environ = WITH_VLLM | {"BATON_WORKER_PID": str(worker_pid)}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def ended_process() -> int:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    return ended.pid


_END = "from workers.engines.vllm.inside import _end_with; _end_with({}, {}); print('it lives')"


def test_a_process_of_a_worker_that_has_ended_ends_itself_and_no_other() -> None:
    ended = ended_process()
    with subprocess.Popen(["sleep", "60"]) as other:  # once it was the parent's id
        for parent in (ended, other.pid):
            assert run_inside(_END.format(ended, parent), os.getpid()).returncode == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


def test_the_core_above_ends_with_the_worker_even_if_it_hangs() -> None:
    line = f"{sys.executable} -c 'import workers.engines.vllm.inside, time; time.sleep(60)' & wait"
    environ = WITH_VLLM | {"BATON_WORKER_PID": str(ended_process())}
    core = subprocess.run(["sh", "-c", line], env=environ, cwd=ROOT, check=False, timeout=PATIENCE_S)
    assert core.returncode == -signal.SIGKILL


_STATE = """
import os, sys, threading
from workers.engines.vllm.patches import kernels
kernels.pass_strides = lambda: print("strides")
{}
import workers.engines.vllm.inside
print(sys.getswitchinterval(), [t.daemon for t in threading.enumerate() if t.name == "end-with-worker"])
"""


def test_only_vllms_own_processes_are_changed() -> None:
    assert run_inside(_STATE.format(""), os.getpid()).stdout == "strides\n0.0005 [True]\n"
    itself = _STATE.format('os.environ["BATON_WORKER_PID"] = str(os.getpid())')
    assert run_inside(itself, os.getpid()).stdout == "0.005 []\n"
    without = _STATE.format('os.environ["BATON_VLLM_WITHOUT"] = "strides"')
    assert run_inside(without, os.getpid()).stdout == "0.0005 [True]\n"
