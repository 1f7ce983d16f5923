"""The grammar server and its forks: replaced when killed, limited, and gone with what they served."""

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import InvalidRequest, Overloaded
from tests.alive import is_running
from tests.guided import Json, answer_form
from tests.waiting import signal_process, until
from workers.engines.embedded.grammar import Grammars

DEMO = Path("models/demo")
VOCAB_SIZE = 3200


async def refusal(grammars: Grammars, schema: Json) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await grammars.matcher(answer_form(schema))
    assert caught.value.param == "response_format"
    return caught.value.message


def servers(tokenizer_path: Path) -> list[int]:
    """The processes that hold forms for this tokenizer."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if str(tokenizer_path).encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def is_listed(process: int) -> bool:
    """Whether it runs, or has ended and was not waited for."""
    return Path(f"/proc/{process}").exists()


def parent(process: int) -> int:
    """As in proc(5)."""
    return int(Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Grammars, Path]]:
    """Grammars whose processes can be told apart from other tests', by the tokenizer's path."""
    path = tmp_path / "tokenizer.json"
    path.symlink_to((DEMO / "tokenizer.json").resolve())
    grammars = Grammars.load(tmp_path, VOCAB_SIZE)
    yield grammars, path
    grammars.close()


async def test_many_slow_schemas_at_once_keep_no_other_waiting(own: tuple[Grammars, Path]) -> None:
    grammars, path = own
    schemas: list[Json] = [{"type": "integer", "multipleOf": 1000003 + 10 * i} for i in range(1, 5)]
    slow = [asyncio.create_task(refusal(grammars, schema)) for schema in schemas]
    [server] = servers(path)
    await until(lambda: len(servers(path)) == 5)
    compiling = set(servers(path)) - {server}
    for process in compiling:
        signal_process(process, signal.SIGSTOP)  # slow enough that none finishes early
    await grammars.matcher(answer_form({"const": "next to many"}))
    assert not any(task.done() for task in slow)
    for process in compiling:
        os.kill(process, signal.SIGCONT)
    assert all("CPU time" in message for message in await asyncio.gather(*slow))


async def test_forms_are_compiled_once(own: tuple[Grammars, Path]) -> None:
    grammars, path = own
    [server] = servers(path)
    await asyncio.gather(*[grammars.matcher(answer_form({"const": "once"})) for _ in range(5)])
    await until(lambda: len(servers(path)) == 2)  # the server, and its fork for the form
    signal_process(server, signal.SIGSTOP)
    try:
        matcher = await grammars.matcher(answer_form({"const": "once"}))
    finally:
        os.kill(server, signal.SIGCONT)
    assert matcher.allowed([], 0) is not None


async def test_a_killed_grammar_process_is_replaced(own: tuple[Grammars, Path]) -> None:
    grammars, path = own
    await grammars.matcher(answer_form({"const": 1}))
    killed = servers(path)
    for process in killed:
        with contextlib.suppress(ProcessLookupError):  # the answer's ends with its matcher
            os.kill(process, signal.SIGKILL)
    await until(lambda: not any(is_running(process) for process in killed))
    for value in (1, 2):
        assert (await grammars.matcher(answer_form({"const": value}))).allowed([], 0) is not None


async def test_one_server_replaces_one_whose_forms_still_run(own: tuple[Grammars, Path]) -> None:
    grammars, path = own
    [server] = servers(path)
    before = await grammars.matcher(answer_form({"const": 1}))
    os.kill(server, signal.SIGKILL)
    await until(lambda: not is_running(server))
    for matcher in await asyncio.gather(*[grammars.matcher(answer_form({"const": i})) for i in (2, 3)]):
        assert matcher.allowed([], 0) is not None
    assert before.allowed([], 0) is not None
    assert not is_listed(server)
    assert [parent(process) for process in servers(path)].count(os.getpid()) == 1


def test_the_server_dumps_no_core_and_gets_no_signal_from_the_workers_terminal(
    own: tuple[Grammars, Path],
) -> None:
    [server] = servers(own[1])
    assert os.getsid(server) == server
    assert resource.prlimit(server, resource.RLIMIT_CORE) == (0, 0)


async def test_a_client_that_leaves_ends_no_compilation_that_others_wait_for(
    own: tuple[Grammars, Path],
) -> None:
    grammars, _ = own
    form = answer_form({"const": "shared"})
    leaving, staying = (asyncio.create_task(grammars.matcher(form)) for _ in range(2))
    await asyncio.sleep(0)  # both wait now
    leaving.cancel()
    assert (await staying).allowed([], 0) is not None


async def test_a_form_is_not_blamed_for_a_killed_process(own: tuple[Grammars, Path]) -> None:
    grammars, path = own
    [server] = servers(path)
    signal_process(server, signal.SIGSTOP)
    asked = asyncio.create_task(grammars.matcher(answer_form({"const": 1})))
    for _ in range(10):
        await asyncio.sleep(0)  # until the form is sent
    os.kill(server, signal.SIGKILL)
    with pytest.raises(Overloaded) as refused:
        await asked
    assert refused.value.retry_after_s == 1.0


async def test_a_form_whose_process_does_not_answer_any_more_is_compiled_again(
    own: tuple[Grammars, Path],
) -> None:
    grammars, path = own
    [server] = servers(path)
    await grammars.matcher(answer_form({"const": 1}))
    await until(lambda: len(servers(path)) == 2)
    [compiled] = set(servers(path)) - {server}
    signal_process(compiled, signal.SIGSTOP)  # its socket takes what it is sent
    asked = [asyncio.create_task(grammars.matcher(answer_form({"const": 1}))) for _ in range(3)]
    await asyncio.sleep(0)
    os.kill(compiled, signal.SIGKILL)
    for matcher in await asyncio.gather(*asked):
        assert matcher.allowed([], 0) is not None


async def test_no_process_outlives_its_answer_or_the_engine(own: tuple[Grammars, Path]) -> None:
    grammars, path = own
    [server] = servers(path)
    matcher = await grammars.matcher(answer_form({"const": 1}))
    assert matcher.allowed([], 0) is not None
    served = servers(path)
    assert len(served) == 3
    matcher.close()
    await until(lambda: sum(is_listed(process) for process in served) == 2)
    signal_process(server, signal.SIGSTOP)
    grammars.close()
    assert not is_listed(server)
    await until(lambda: not servers(path))


def test_a_tokenizer_that_does_not_fit_the_model_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="vocab"):
        Grammars.load(DEMO, 10)
