"""A supervisor replaces processes that end: all of them, the old ones at once, none while it drains."""

import os
import signal

import pytest

from frontend.processes import supervisor
from tests.supervisors import Start, answer, is_running
from tests.waiting import signal_process, wait_for


def test_a_dead_process_is_replaced_while_the_other_serves(start: Start) -> None:
    supervised = start(2)
    num_open = supervised.num_open
    index, pid = supervised.ask("exit 3")
    supervised.wait_logged(f"process_ended process={index} status=3")
    assert {supervised.ask()[0] for _ in range(3)} == {1 - index}
    supervised.wait_logged("process_ready", 3)
    assert {supervised.ask()[0] for _ in range(2)} == {0, 1}
    assert not is_running(pid)
    assert supervised.text().count("serving") == 1
    wait_for(lambda: supervised.num_open <= num_open)


def test_processes_that_die_together_are_all_replaced(start: Start) -> None:
    supervised = start(2)
    pids = [supervised.ask()[1] for _ in range(2)]
    signal_process(supervised.popen.pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, pids)))
    signal_process(supervised.popen.pid, signal.SIGCONT)
    supervised.wait_logged("process_ready", 4)


def test_a_process_that_lived_long_is_replaced_at_once_and_one_that_did_not_waits(start: Start) -> None:
    assert supervisor.RESTART_S == 1.0  # changed there
    supervised = start(1, "aged")
    supervised.wait_logged("serving")
    supervised.ask("exit 3")
    supervised.wait_logged("process_ready", 2)
    supervised.ask("exit 3")
    supervised.wait_logged("process_ended", 2)
    with supervised.say("who") as client:
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            answer(client)
    supervised.signal(signal.SIGTERM)
    assert supervised.wait() == 0


def test_a_process_can_be_ended_by_a_signal(start: Start) -> None:
    supervised = start(1)
    index, pid = supervised.ask()
    os.kill(pid, signal.SIGTERM)
    supervised.wait_logged(f"process_ended process={index} status=-15")


def test_a_connection_waits_for_the_process_that_replaces_the_only_one(start: Start) -> None:
    supervised = start(1)
    _, pid = supervised.ask("exit 3")
    supervised.wait_logged("process_ended")
    with supervised.say("who") as client:
        assert answer(client)[1] != pid
        assert client.recv(1) == b""  # the process that was made meanwhile has no copy of its own


def test_a_drain_starts_no_process_again(start: Start) -> None:
    supervised = start(1)
    supervised.ask("exit 3")
    supervised.wait_logged("process_ended")
    supervised.signal(signal.SIGTERM)
    assert supervised.wait() == 0


def test_a_replacement_that_does_not_start_is_tried_again_while_the_other_serves(start: Start) -> None:
    supervised = start(2, "replacements")
    supervised.wait_logged("process_ready", 2)
    index, _ = supervised.ask("exit 3")
    other = supervised.ask()
    supervised.wait_logged(f"process_ended process={index} status=5", 2)
    supervised.wait_logged("process_ready", 3)
    assert other in {supervised.ask() for _ in range(2)}
    assert "draining" not in supervised.text()
    supervised.signal(signal.SIGTERM)
    assert supervised.wait() == 0
