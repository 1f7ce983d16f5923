"""Process life: the first signal drains, the second ends; `first_of` returns the first result."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from baton.process import NotStarted, first_of, needed
from tests.clock import jumping, run_jumping
from tests.waiting import PATIENCE_S

# A process that reports when it listens and when it was asked to end, and then takes time.
DRAINING = """
import asyncio, logging, sys
from baton.process import run
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
async def main(shutdown):
    print("listening", flush=True)
    await shutdown.wait()
    assert shutdown.is_set()
    if sys.argv[1] == "slow":
        await asyncio.Event().wait()
    return 7
sys.exit(run(main))
"""


def ended(speed: str, *signals: signal.Signals) -> tuple[int, list[str]]:
    """The exit status and log of a process that gets these signals, each after the previous one's line."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRAINING, speed], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "listening\n"
        lines = []
        for number in signals:
            process.send_signal(number)
            lines.append(process.stdout.readline().strip())
        return process.wait(PATIENCE_S), lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_the_exit_status_is_mains(number: signal.Signals) -> None:
    assert ended("fast", number) == (7, [f"draining signal={number.name}"])


def test_a_second_signal_ends_the_process_at_once() -> None:
    status, lines = ended("slow", signal.SIGTERM, signal.SIGINT)
    assert lines == ["draining signal=SIGTERM", "forced signal=SIGINT"]
    assert status == 128 + signal.SIGINT


async def test_of_several_waits_the_first_that_ends_counts_and_the_others_have_cleaned_up() -> None:
    cleaned: list[str] = []

    async def wait(name: str) -> str:
        try:
            await asyncio.sleep(0 if name == "b" else 3600)  # the others wait until they are cancelled
        finally:
            await asyncio.sleep(0)  # cleaning up takes a turn
            cleaned.append(name)
        return name

    assert await first_of(wait("a"), wait("b"), wait("c")) == "b"
    assert sorted(cleaned) == ["a", "b", "c"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_what_is_needed_at_start_is_waited_for_with_a_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    async def late() -> int:
        await asyncio.sleep(3.5)
        return 7

    assert run_jumping(needed("NATS", late())) == 7
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting for NATS waited_s={waited_s} limit_s=60" for waited_s in (1, 2, 3)
    ]


@jumping
async def test_what_does_not_come_ends_the_start_with_a_sentence() -> None:
    ended = asyncio.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(NotStarted, match="NATS did not answer within 60 s"):
        await needed("NATS", never())
    assert ended.is_set()


NOT_STARTED = """
import sys
from baton.process import NotStarted, run
async def main(shutdown):
    raise NotStarted("NATS did not answer")
sys.exit(run(main))
"""


def test_a_process_that_does_not_start_says_why_without_a_traceback() -> None:
    process = subprocess.run([sys.executable, "-c", NOT_STARTED], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (1, "NATS did not answer\n")
