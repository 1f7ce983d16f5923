"""Connections pass from the supervisor to a process, until one of the two is full or gone."""

import errno
import os
import resource
import socket

import pytest

from frontend.processes.supervisor import READY, ProcessEnd, channel, pass_on


def ends() -> tuple[socket.socket, ProcessEnd, list[str]]:
    """Both ends, and a list that says when the process's was told of the supervisor's end."""
    told: list[str] = []
    ours, theirs = channel()
    end = ProcessEnd(theirs, ("127.0.0.1", 8000), lambda: told.append("ended"))
    end.setblocking(False)
    ours.setblocking(False)
    return ours, end, told


def test_a_connection_is_the_same_on_the_other_end() -> None:
    supervisor, process, _ = ends()
    client, connection = socket.socketpair()
    with client:
        assert pass_on(connection, supervisor)
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


def test_a_process_is_ready_when_it_says_so_and_takes_nothing_once_it_has_closed() -> None:
    supervisor, process, told = ends()
    process.ready()
    assert supervisor.recv(1) == READY
    process.close()
    client, connection = socket.socketpair()
    with client, connection:
        assert not pass_on(connection, supervisor)
    supervisor.close()
    assert not told


def test_a_process_that_does_not_accept_is_full_in_the_end() -> None:
    supervisor, process, _ = ends()
    client, connection = socket.socketpair()
    num_passed = 0
    with client, connection:
        while num_passed < 100_000 and pass_on(connection, supervisor):
            num_passed += 1
        assert 16 <= num_passed < 100_000
        process.accept()[0].close()
        assert pass_on(connection, supervisor)
    process.close()
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
        assert pass_on(connection, supervisor)
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
