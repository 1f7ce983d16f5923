"""The next frontend takes the listening socket of the running one, over real Unix sockets."""

import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import pytest

from frontend.processes import takeover
from frontend.processes.takeover import TAKE_TIMEOUT_S, Offer, Taken
from tests.waiting import PATIENCE_S

T = TypeVar("T")
AsOther = Callable[[Callable[[], object]], object]
OTHER_UID = os.getuid() + 1


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "TAKE_TIMEOUT_S", PATIENCE_S)


def name(port: int, uid: int = os.getuid()) -> bytes:
    """Under which a user's frontends offer the socket of this port."""
    return b"\0baton-frontend-%d-%d" % (uid, port)


class Running:
    """A frontend that listens and offers its socket, and the event loop that it does so in."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.num_drains = 0
        self.selector = selectors.DefaultSelector()
        self.offer = Offer(self.listener, self._watch, self._drain)
        self._threads = ThreadPoolExecutor(1)

    def close(self) -> None:
        self._threads.shutdown()
        self.offer.close()
        self.selector.close()
        self.listener.close()

    @property
    def num_watched(self) -> int:
        return len(self.selector.get_map())

    def turn(self) -> None:
        """Wait for an event, and act on it."""
        ready = self.selector.select(PATIENCE_S)
        assert ready
        for key, _ in ready:
            key.data()

    def meanwhile(self, call: Callable[[], T], num_turns: int = 1) -> T:
        """The result of what another process does while this one runs its event loop."""
        calling: Future[T] = self._threads.submit(call)
        for _ in range(num_turns):
            self.turn()
        return calling.result(PATIENCE_S)

    def taken(self) -> Taken:
        return self.meanwhile(lambda: Taken(self.port))

    def _watch(self, readable: socket.socket, callback: Callable[[], object] | None) -> None:
        if callback is None:
            self.selector.unregister(readable)
        else:
            self.selector.register(readable, selectors.EVENT_READ, callback)

    def _drain(self) -> None:
        self.num_drains += 1
        assert self.num_watched == 0  # the name is free for the next one


@pytest.fixture
def running() -> Iterator[Running]:
    with closing(Running()) as running:
        running.offer.open()
        yield running


def is_offered(port: int) -> bool:
    with closing(Taken(port)) as taken:
        return taken.listener is not None


def test_the_next_frontend_accepts_on_the_same_socket(running: Running) -> None:
    with closing(running.taken()) as taken:
        assert taken.listener is not None
        assert not os.get_inheritable(taken.listener.fileno())
        assert os.fstat(taken.listener.fileno()).st_ino == os.fstat(running.listener.fileno()).st_ino
        running.listener.close()
        with socket.create_connection(("127.0.0.1", running.port)) as client:
            connection, address = taken.listener.accept()
            with connection:
                assert address == client.getsockname()


def test_the_running_frontend_drains_once_the_next_one_serves(running: Running) -> None:
    taken = running.taken()
    assert taken.listener is not None
    assert running.num_drains == 0
    running.meanwhile(taken.serving)
    assert running.num_drains == 1
    assert running.num_watched == 0
    assert not is_offered(running.port)
    taken.listener.close()


def test_the_next_frontend_offers_the_socket_in_turn(running: Running) -> None:
    taken = running.taken()
    assert taken.listener is not None
    running.meanwhile(taken.serving)
    running.offer = Offer(taken.listener, running._watch, running._drain)  # noqa: SLF001  the same loop
    running.offer.open()
    with closing(running.taken()) as after:
        assert after.listener is not None
    taken.listener.close()


class Other:
    """Offers a socket as the test says, without an `Offer`."""

    def __init__(self, uid: int = os.getuid()) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._offer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._offer.bind(name(self.port, uid))
        self._offer.listen(1)
        self.taker = self._offer

    def __enter__(self) -> "Other":
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.listener, self._offer, self.taker):
            each.close()

    def meanwhile(self, take: Callable[[int], Taken]) -> Taken:
        """Give the listener to one that takes it."""
        with ThreadPoolExecutor(1) as threads:
            taking = threads.submit(take, self.port)
            self.taker, _ = self._offer.accept()
            socket.send_fds(self.taker, [b"l"], [self.listener.fileno()])
            return taking.result(PATIENCE_S)


def test_the_next_frontend_waits_until_the_name_is_free() -> None:
    with Other() as other:
        taken = other.meanwhile(Taken)
        with closing(taken), ThreadPoolExecutor(1) as threads:
            serving = threads.submit(taken.serving)
            assert other.taker.recv(1) == b"s"
            other.taker.settimeout(0.1)
            with pytest.raises(TimeoutError):  # it has not hung up
                other.taker.recv(1)
            other.taker.close()
            serving.result(PATIENCE_S)


def test_a_next_frontend_that_ends_before_it_serves_changes_nothing(running: Running) -> None:
    running.taken().close()
    running.turn()
    assert (running.num_drains, running.num_watched) == (0, 1)
    with closing(running.taken()) as taken:
        assert taken.listener is not None
    assert taken.listener.fileno() == -1  # not one more that listens


def test_what_is_not_the_word_of_a_frontend_drains_nothing(running: Running) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(name(running.port))
        running.turn()
        stranger.send(b"x")
        running.turn()
    assert (running.num_drains, running.num_watched) == (0, 1)


def test_a_next_frontend_that_dies_before_it_has_read_the_socket_changes_nothing(running: Running) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(name(running.port))
        running.turn()
    running.turn()
    assert (running.num_drains, running.num_watched) == (0, 1)


def test_an_offer_that_is_withdrawn_can_be_made_again(running: Running) -> None:
    first = running.taken()
    running.offer.close()
    assert running.num_watched == 0
    assert not is_offered(running.port)
    first.serving()  # too late to be told
    assert running.num_drains == 0
    running.offer.open()
    with closing(running.taken()) as taken:
        assert taken.listener is not None
    assert first.listener is not None
    first.listener.close()


def test_a_process_that_disowns_the_offer_does_not_keep_the_name(running: Running) -> None:
    pid = os.fork()
    if pid == 0:  # as a frontend's process does
        running.offer.disown()
        while True:
            signal.pause()
    try:
        with closing(running.taken()) as taken:
            assert taken.listener is not None
        running.offer.close()
        assert not is_offered(running.port)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_frontend_without_descriptors_goes_on(running: Running) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taker:
        taker.connect(name(running.port))
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            running.turn()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        running.turn()
        assert running.num_watched == 2


def test_nothing_is_taken_without_a_port_or_where_none_runs() -> None:
    assert TAKE_TIMEOUT_S == 1.0
    for port in (None, 1):
        with closing(Taken(port)) as taken:
            assert taken.listener is None
            taken.serving()


def test_a_frontend_that_has_stopped_listening_gives_nothing(running: Running) -> None:
    running.listener.close()
    with closing(running.taken()) as taken:
        assert taken.listener is None
    assert running.num_watched == 1


def test_a_frontend_that_hangs_is_left_alone(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "TAKE_TIMEOUT_S", 0.05)
    assert not is_offered(running.port)
    assert running.num_drains == 0


def test_the_second_offer_of_a_port_is_only_a_warning(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    second = Offer(running.listener, lambda _readable, _callback: None, lambda: None)
    second.open()
    assert second.is_open
    assert "a next frontend cannot take over the port error=" in caplog.text
    second.close()
    with closing(running.taken()) as taken:
        assert taken.listener is not None


@pytest.fixture
def as_other(monkeypatch: pytest.MonkeyPatch) -> AsOther:
    """Makes a call as a process that takes itself for another user's; the kernel knows better."""

    def as_other(call: Callable[[], object]) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda: OTHER_UID)
            return call()

    return as_other


def test_another_users_frontend_gets_no_socket(running: Running, as_other: AsOther) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(name(running.port))
        as_other(running.turn)
        stranger.settimeout(PATIENCE_S)
        assert socket.recv_fds(stranger, 1, 1)[:2] == (b"", [])
    assert running.num_watched == 1


def test_another_users_socket_is_not_taken(as_other: AsOther) -> None:
    with Other(OTHER_UID) as other:
        taken: list[Taken] = []
        as_other(lambda: taken.append(other.meanwhile(Taken)))
        with closing(taken[0]):
            assert taken[0].listener is None


INHERITING = """
import os, sys
from frontend.processes.takeover import inherited
os.dup2(int(sys.argv[1]), 3)
os.environ["LISTEN_PID"] = str(os.getpid() + int(sys.argv[2]))
listener = inherited()
if listener is None:
    sys.exit("nothing")
assert not os.get_inheritable(3)
assert not [name for name in os.environ if name.startswith("LISTEN_")]
print(listener.getsockname()[1])
"""


def inherited_by(passed: socket.socket, num_sockets: str, *, pid_offset: int = 0) -> tuple[str, str]:
    """What a process writes that gets this socket as systemd passes it."""
    process = subprocess.run(
        [sys.executable, "-c", INHERITING, str(passed.fileno()), str(pid_offset)],
        pass_fds=[passed.fileno()],
        env={**os.environ, "LISTEN_FDS": num_sockets, "LISTEN_FDNAMES": "http"},
        capture_output=True,
        text=True,
        check=False,
    )
    return process.stdout.strip(), process.stderr.strip()


def test_the_socket_that_systemd_passes_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert inherited_by(listener, "1") == (str(listener.getsockname()[1]), "")


@pytest.mark.parametrize(("num_sockets", "pid_offset"), [("1", 1), ("0", 0), ("", 0), ("-1", 0)])
def test_what_systemd_passes_to_others_is_not_used(num_sockets: str, pid_offset: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert inherited_by(listener, num_sockets, pid_offset=pid_offset) == ("", "nothing")


def test_more_sockets_than_one_or_one_that_does_not_listen_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as deaf:
        for passed, num_sockets in ((listener, "2"), (deaf, "1")):
            _, said = inherited_by(passed, num_sockets)
            assert "use ListenStream=" in said
