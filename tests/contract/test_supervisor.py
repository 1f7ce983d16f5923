"""A supervisor and its processes: who gets connections, who does not start, how it drains."""

import asyncio
import errno
import itertools
import os
import resource
import signal
import socket
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from frontend.processes import takeover
from frontend.processes.supervisor import pass_on
from frontend.processes.takeover import Port
from tests.supervised import small_channel
from tests.supervisors import Start, answer, is_running
from tests.waiting import PATIENCE_S, wait_for


def test_processes_get_connections_in_turn(start: Start) -> None:
    supervised = start(3)
    asked = [supervised.ask() for _ in range(6)]
    assert {index for index, _ in asked[:3]} == {0, 1, 2}
    assert asked[3:] == asked[:3]
    assert supervised.text().count("serving") == 1


def test_keys_pressed_in_a_terminal_reach_only_the_supervisor(start: Start) -> None:
    _, pid = start(1).ask()
    assert os.getpgid(pid) == pid


def test_a_process_that_handles_signals_itself_does_not_tell_the_supervisor(start: Start) -> None:
    supervised = start(1)
    _, pid = supervised.ask("handle")
    assert {supervised.ask() for _ in range(5)} == {(0, pid)}
    assert "draining" not in supervised.text()
    with supervised.say("who") as client:
        answer(client)
        assert not client.recv(1)  # it has closed the connection
    open_files = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    assert "anon_inode:[eventpoll]" not in open_files  # the supervisor's


def test_connections_that_no_process_can_take_wait(start: Start) -> None:
    supervised = start(1)
    with supervised.say("hold") as holding:
        answer(holding)
        clients = [supervised.say("who") for _ in range(50)]
        assert supervised.is_idle()
    assert {answer(client)[0] for client in clients} == {0}
    assert supervised.is_idle()
    for client in clients:
        client.close()


def test_a_full_process_is_passed_over(start: Start) -> None:
    supervised = start(2)
    with supervised.say("hold") as holding:
        held, _ = answer(holding)
        clients = [supervised.say("who") for _ in range(50)]
        assert {answer(client)[0] for client in clients[40:]} == {1 - held}
    assert held in {answer(client)[0] for client in clients[:40]}
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    ("failure", "status", "told"), [("status", 5, 5), ("exception", 1, 1), ("kill", 1, -9)]
)
def test_a_process_that_does_not_start_ends_the_supervisor(
    failure: str, status: int, told: int, start: Start
) -> None:
    supervised = start(2, failure)
    assert supervised.wait() == status
    assert f"process_ended process=1 status={told}\n" in supervised.text()
    assert ("ValueError: spoilt" in supervised.text()) == (failure == "exception")
    assert not supervised.is_listening()


def test_a_drain_lets_processes_finish_and_refuses_connections(start: Start) -> None:
    supervised = start(2)
    supervised.ask("exit 3")
    supervised.wait_logged("process_ready", 3)  # the third was made after the offer
    with supervised.say("linger") as first, supervised.say("linger") as second:
        assert {answer(first)[0], answer(second)[0]} == {0, 1}
        supervised.signal(signal.SIGTERM)
        wait_for(lambda: not supervised.is_listening())
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            name = b"\0baton-frontend-%d-%d" % (os.getuid(), supervised.port)
            assert probe.connect_ex(name) == errno.ECONNREFUSED  # no process has a copy of the offer
        assert supervised.popen.poll() is None
    assert supervised.wait() == 0
    assert "draining signal=SIGTERM" in supervised.text()


def test_a_process_that_is_ready_only_when_it_drains_gets_nothing(start: Start) -> None:
    supervised = start(2, "late")
    supervised.wait_logged("serving")
    supervised.wait_logged("late pid=")
    assert {supervised.ask()[0] for _ in range(4)} == {0}
    supervised.signal(signal.SIGTERM)
    supervised.wait_logged("process_ready", 2)
    os.kill(int(supervised.text().partition("late pid=")[2].split()[0]), signal.SIGTERM)
    assert supervised.wait() == 0


def num_taken() -> int:
    """How many connections wait for a process."""
    ours, theirs = small_channel()
    ours.setblocking(False)
    with ours, theirs:
        return next(number for number in itertools.count() if not pass_on(theirs, ours))


def test_a_connection_that_no_process_has_is_closed_when_it_drains(start: Start) -> None:
    supervised = start(1)
    num_open = supervised.num_open
    with supervised.say("linger") as lingering, ExitStack() as clients:
        answer(lingering)
        for _ in range(num_taken()):
            clients.enter_context(supervised.say("who"))
        last = clients.enter_context(supervised.say("who"))
        wait_for(lambda: supervised.num_open > num_open)
        supervised.signal(signal.SIGINT)
        with suppress(ConnectionResetError):
            assert not last.recv(64)
        with pytest.raises(subprocess.TimeoutExpired):  # it does not go back to accepting
            supervised.popen.wait(0.3)
    assert supervised.wait() == 0


def test_a_second_signal_kills(start: Start) -> None:
    supervised = start(1)
    with supervised.say("linger") as lingering:
        _, pid = answer(lingering)
        supervised.signal(signal.SIGTERM)
        supervised.wait_logged("draining")
        supervised.signal(signal.SIGINT)
        assert supervised.wait() == 128 + signal.SIGINT
    assert not is_running(pid)


def test_processes_end_with_a_supervisor_that_is_killed(start: Start) -> None:
    supervised = start(3)
    pids = [supervised.ask()[1] for _ in range(3)]
    supervised.kill()
    wait_for(lambda: not any(map(is_running, pids)))
    assert not supervised.is_listening()


def test_a_process_that_is_busy_keeps_no_other_from_ending_with_the_supervisor(start: Start) -> None:
    supervised = start(2)
    index, pid = supervised.ask()
    if index == 1:  # that connection is in turn again after the next
        index, pid = supervised.ask()
    with supervised.say("hold") as holding:
        assert (index, answer(holding)[0]) == (0, 1)  # the second one was made last
        supervised.kill()
        wait_for(lambda: not is_running(pid))


def test_without_descriptors_connections_wait(start: Start) -> None:
    supervised = start(1)
    pid = supervised.popen.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    with supervised.say("who") as client:
        supervised.wait_logged("accept=paused", 2)
        assert supervised.is_idle()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert answer(client)[0] == 0


async def test_it_drains_once_a_next_frontend_serves(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "TAKE_TIMEOUT_S", PATIENCE_S)
    supervised = start(1)
    for _ in range(2):  # they end before they serve
        taken = Port.taken(supervised.port)
        assert taken is not None
        taken.close()
    taken = Port.taken(supervised.port)
    assert taken is not None

    async def serving(port: Port) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(port.passed_on(), 0.1)

    await serving(taken)
    assert supervised.wait() == 0
    assert supervised.is_listening()  # through the socket that was taken
    taken.close()
