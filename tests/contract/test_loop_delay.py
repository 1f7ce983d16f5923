"""A process that was stopped has the delay afterwards, whether it waited or computed."""

import asyncio
import signal
import sys
import time

import pytest

CHILD = """
import asyncio, sys, threading, time
from baton.loop_delay import LoopDelay

async def main(works):
    delays = LoopDelay()
    delays.start()
    await asyncio.sleep(0.2)  # the timer has fired
    began_s = time.perf_counter()
    print("begun", flush=True)
    read = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await (read if works == "waits" else asyncio.to_thread(compute, read))
    print(*delays.longest(began_s), flush=True)

def compute(read):
    while not read.done():
        sum(range(10_000))

if sys.argv[2] == "uvloop":
    import uvloop
    uvloop.run(main(sys.argv[1]))
else:
    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("works", ["waits", "computes"])
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
async def test_a_stopped_process_was_late(works: str, loop: str) -> None:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, works, loop, stdin=pipe, stdout=pipe
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        await child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        began_s = time.perf_counter()
        child.stdin.write(b"\n")
        await asyncio.sleep(0.6)  # it stands still
        stopped_s = time.perf_counter() - began_s
        child.send_signal(signal.SIGCONT)
        delay_s, starved_s = map(float, (await child.stdout.readline()).split())
    finally:
        child.kill()
        await child.wait()
    assert delay_s > stopped_s - 0.15, "its timer fires every 0.1 s"
    assert starved_s < delay_s - stopped_s / 2, "of the rest it may have waited for a CPU"
