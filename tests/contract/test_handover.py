"""Connections pass from the supervisor to a process, until one of the two is full or gone."""

import errno
import os
import resource
import socket

import pytest

from frontend.processes.handover import ProcessEnd, SupervisorEnd, channel


def ends() -> tuple[SupervisorEnd, ProcessEnd, list[str]]:
    """Both ends, and a list that says when the process's was told of the supervisor's end."""
    told: list[str] = []
    ours, theirs = channel()
    end = ProcessEnd(theirs, ("127.0.0.1", 8000), lambda: told.append("ended"))
    end.setblocking(False)
    return SupervisorEnd(ours), end, told


def test_a_connection_is_the_same_on_the_other_end() -> None:
    supervisor, process, _ = ends()
    client, connection = socket.socketpair()
    with client:
        assert supervisor.pass_on(connection)
        connection.close()  # the supervisor's copy
        passed, _ = process.accept()
        with passed:
            assert not os.get_inheritable(passed.fileno())
            client.sendall(b"hello")
            assert passed.recv(5) == b"hello"
    with pytest.raises(BlockingIOError):
        process.accept()
    assert process.getsockname() == ("127.0.0.1", 8000)
    supervisor.close()
    process.close()


def test_a_process_is_ready_when_it_says_so() -> None:
    supervisor, process, told = ends()
    assert (supervisor.receive(), supervisor.is_ready) == (True, False)
    process.ready()
    assert (supervisor.receive(), supervisor.is_ready) == (True, True)
    process.close()
    assert (supervisor.receive(), supervisor.is_ready) == (False, False)
    client, connection = socket.socketpair()
    with client, connection:
        assert not supervisor.pass_on(connection)
    supervisor.close()
    assert not told


def test_a_process_that_does_not_accept_is_full_in_the_end() -> None:
    supervisor, process, _ = ends()
    client, connection = socket.socketpair()
    num_passed = 0
    with client, connection:
        while num_passed < 100_000 and supervisor.pass_on(connection):
            num_passed += 1
        assert 16 <= num_passed < 100_000
        process.accept()[0].close()
        assert supervisor.pass_on(connection)
    process.ready()
    assert (supervisor.receive(), supervisor.is_ready) == (True, True)
    process.close()  # with connections that it has not accepted
    assert (supervisor.receive(), supervisor.is_ready) == (False, False)
    supervisor.close()


def test_the_process_is_told_of_the_supervisors_end() -> None:
    supervisor, process, told = ends()
    supervisor.close()
    with pytest.raises(BlockingIOError):
        process.accept()
    assert told == ["ended"]
    process.ready()
    assert told == ["ended", "ended"]
    process.close()


def test_a_connection_lost_for_want_of_descriptors_is_an_error() -> None:
    supervisor, process, _ = ends()
    client, connection = socket.socketpair()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with client, connection:
        assert supervisor.pass_on(connection)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files") as error:
                process.accept()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert error.value.errno == errno.EMFILE
    supervisor.close()
    process.close()
