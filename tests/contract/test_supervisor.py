"""A supervisor and its processes: who does not start, who is replaced, how it drains."""

import os
import signal

import pytest

from frontend.processes.supervisor import Port
from tests.alive import is_running
from tests.supervisors import Start, answer
from tests.waiting import signal_process, wait_for


def test_keys_pressed_in_a_terminal_reach_only_the_supervisor(start: Start) -> None:
    _, pid = start(1).ask()
    assert os.getpgid(pid) == pid


@pytest.mark.parametrize(
    ("failure", "status", "logged"), [("status", 5, 5), ("exception", 1, 1), ("kill", 1, -9)]
)
def test_a_process_that_does_not_start_ends_the_supervisor(
    failure: str, status: int, logged: int, start: Start
) -> None:
    supervised = start(2, failure)
    assert supervised.wait() == status
    assert f"process_ended process=1 status={logged}\n" in supervised.text()
    assert ("ValueError: spoilt" in supervised.text()) == (failure == "exception")
    assert not supervised.is_listening()


def test_a_drain_lets_processes_finish_and_refuses_connections(start: Start) -> None:
    supervised = start(1)
    with supervised.say("linger") as first:
        answer(first)
        supervised.signal(signal.SIGTERM)
        supervised.wait_logged("draining signal=SIGTERM")
        assert Port.taken(supervised.port) is None
        assert supervised.popen.poll() is None
    assert supervised.wait() == 0
    assert not supervised.is_listening()


def test_a_second_signal_kills(start: Start) -> None:
    supervised = start(1)
    with supervised.say("linger") as lingering:
        _, pid = answer(lingering)
        supervised.signal(signal.SIGTERM)
        supervised.wait_logged("draining")
        supervised.signal(signal.SIGINT)
        assert supervised.wait() == 128 + signal.SIGINT
    assert not is_running(pid)


def test_a_dead_process_is_replaced_while_the_other_serves(start: Start) -> None:
    supervised = start(2)
    num_open = supervised.num_open
    index, pid = supervised.ask("exit 3")
    supervised.wait_logged(f"process_ended process={index} status=3")
    supervised.ask()
    supervised.wait_logged("process_ready", 3)
    wait_for(lambda: supervised.ask()[0] == index)
    assert not is_running(pid)
    assert supervised.text().count("serving") == 1
    wait_for(lambda: supervised.num_open <= num_open)


def test_processes_that_die_together_are_all_replaced(start: Start) -> None:
    supervised = start(2)
    pids = supervised.pids()
    signal_process(supervised.popen.pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, pids)))
    signal_process(supervised.popen.pid, signal.SIGCONT)
    supervised.wait_logged("process_ready", 4)


def test_a_connection_waits_for_the_process_that_replaces_the_only_one(start: Start) -> None:
    supervised = start(1)
    _, pid = supervised.ask("exit 3")
    supervised.wait_logged("process_ended")
    with supervised.say("who") as client:
        assert answer(client)[1] != pid
        assert client.recv(1) == b""  # the process that was made meanwhile has no copy of its own


def test_a_replacement_that_does_not_start_is_tried_again_while_the_other_serves(start: Start) -> None:
    supervised = start(2, "replacements")
    supervised.wait_logged("process_ready", 2)
    index, _ = supervised.ask("exit 3")
    supervised.ask()
    supervised.wait_logged(f"process_ended process={index} status=5", 2)
    supervised.wait_logged("process_ready", 3)
    assert "draining" not in supervised.text()
    supervised.signal(signal.SIGTERM)
    assert supervised.wait() == 0
