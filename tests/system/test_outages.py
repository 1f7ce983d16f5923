"""What all streams need goes away for a while: they wait for it and go on exactly."""

import asyncio
import signal
from collections.abc import Callable, Iterator

import nats
import pytest
from nats.aio.msg import Msg

from tests.answers import Stream, read_all, whole_answer
from tests.conftest import LaunchServer, ServerProcess
from tests.stack import Stack
from tests.waiting import PATIENCE_S, scaled, wait_for

LONG = 300
NUM_STREAMS = 4


@pytest.fixture(scope="module")
def own_nats(launch_nats: LaunchServer) -> Iterator[ServerProcess]:
    """A NATS server that the tests may kill."""
    server = launch_nats()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def nats_stack(
    tmp_path_factory: pytest.TempPathFactory, own_nats: ServerProcess
) -> Iterator[tuple[Stack, str]]:
    """Over files and NATS, and the answer of an undisturbed run."""
    environ = {"BATON_REQUEST_PLANE": "nats", "NATS_SERVER": own_nats.url}
    with Stack(tmp_path_factory.mktemp("nats"), environ) as stack:
        yield stack, started(stack)


@pytest.fixture(scope="module")
def tcp_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    """Over files and TCP, and the answer of an undisturbed run."""
    with Stack(tmp_path_factory.mktemp("tcp"), {"BATON_LIVENESS_S": str(scaled(1.0))}) as stack:
        yield stack, started(stack, "--wait-for-worker-s", "60")


def started(stack: Stack, *flags: str) -> str:
    """Start two workers of each role; returns the answer of an undisturbed run."""
    stack.serve(*("prefill", "decode") * 2, flags=flags)
    return whole_answer(stack, LONG)


def running(stack: Stack) -> list[Stream]:
    """Streams that have come to different points."""
    return [Stream(stack, LONG).read(1 + i) for i in range(NUM_STREAMS)]


async def disturb(url: str, num_messages: int) -> None:
    """Sends garbage to the subjects of this many live messages, and each message again."""
    other = await nats.connect(url)
    garbage = b"\xc1 garbage"
    seen: set[bytes] = {garbage}
    enough = asyncio.Event()

    async def disturbing(message: Msg) -> None:
        if message.data in seen or not message.subject.startswith("baton."):
            return
        seen.add(message.data)
        for data in garbage, message.data:
            await other.publish(message.subject, data, message.reply)
        if len(seen) > num_messages:
            enough.set()

    try:
        await other.subscribe(">", cb=disturbing)
        await asyncio.wait_for(enough.wait(), PATIENCE_S)
    finally:
        await other.close()


async def test_others_on_nats_do_not_disturb_streams(
    nats_stack: tuple[Stack, str], own_nats: ServerProcess
) -> None:
    stack, expected = nats_stack
    streams = running(stack)

    await disturb(own_nats.url, 100)

    read_all(streams, expected)
    frontend, *workers = stack.processes
    assert " retrying " not in frontend.text()
    for process in frontend, *(worker for worker in workers if worker.name.startswith("decode")):
        assert "unauthenticated_messages=1 " in process.text()
    assert stack.gauge("baton_worker_unauthenticated_messages_total") > 0
    stack.wait_idle()


@pytest.mark.parametrize(
    ("harm", "repair"),
    [(ServerProcess.kill, ServerProcess.start), (ServerProcess.freeze, ServerProcess.thaw)],
    ids=["killed", "frozen"],
)
def test_streams_outlive_nats(
    nats_stack: tuple[Stack, str],
    own_nats: ServerProcess,
    harm: Callable[[ServerProcess], None],
    repair: Callable[[ServerProcess], None],
) -> None:
    stack, expected = nats_stack
    away = [process.text().count("plane=unreachable") + 1 for process in stack.processes]
    streams = running(stack)

    harm(own_nats)
    wait_for(lambda: [process.text().count("plane=unreachable") for process in stack.processes] == away)
    wait_for(lambda: stack.health()["unreachable"] == ["NATS: requests wait for it"])
    assert stack.get("/fleet").json()["workers"][0]["reason"] == "the NATS server is unreachable"
    repair(own_nats)

    read_all(streams, expected)
    stack.wait_idle()
    verdicts = [each["verdict"] for each in stack.get("/requests?failed=4").json()["requests"]]
    found = {(each["cause"], each["worker"]) for each in verdicts}
    assert stack.health()["unreachable"] == []
    assert (len(verdicts), found) == (4, {("NATS could not be reached", "")})


def test_streams_wait_for_a_whole_fleet_that_is_started_again(tcp_stack: tuple[Stack, str]) -> None:
    """More workers than a request may take with it."""
    stack, expected = tcp_stack
    streams = running(stack)

    workers = stack.processes[1:]
    for process in workers:
        process.kill()
        stack.processes.remove(process)
    wait_for(lambda: stack.health()["missing"] == ["decode", "prefill"])
    refused = stack.post("/v1/completions", prompt="x")
    for role in ("prefill", "decode") * 2:
        stack.worker(role)

    read_all(streams, expected)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    stack.wait_ready(2, 2)


def test_streams_outlive_a_frontend_that_stands_still(tcp_stack: tuple[Stack, str]) -> None:
    """For longer than its workers keep what is sent to it."""
    stack, expected = tcp_stack
    streams = running(stack)

    stack.processes[0].signal(signal.SIGSTOP)
    decodes = [process for process in stack.processes if process.name.startswith("decode")]
    wait_for(lambda: all("caller_lost" in decode.text() for decode in decodes))
    stack.processes[0].signal(signal.SIGCONT)

    read_all(streams, expected)
    stack.wait_idle()
