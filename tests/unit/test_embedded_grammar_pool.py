"""A slow or broken schema costs its own request only, and a process that is killed nobody."""

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from baton.errors import InvalidRequest, NotReady
from frontend.text.tokenizer import ModelTokenizer
from tests.alive import is_running
from tests.guided import CASES, ENDLESS, Json, allowed_after, answer_form
from tests.waiting import scaled, signal_process, until
from workers.engines.embedded import grammar
from workers.engines.embedded.grammar import Grammars

DEMO = Path("models/demo")
VOCAB_SIZE = 3200


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(DEMO)


@pytest_asyncio.fixture
async def own(tmp_path: Path) -> AsyncIterator[tuple[Grammars, Path]]:
    """Grammars whose processes can be distinguished from other tests', by the tokenizer's path."""
    path = tmp_path / "tokenizer.json"
    path.symlink_to((DEMO / "tokenizer.json").resolve())
    grammars = Grammars(tmp_path, VOCAB_SIZE)
    yield grammars, path
    grammars.close()


@pytest.fixture
def grammars(own: tuple[Grammars, Path]) -> Grammars:
    return own[0]


def processes(tokenizer_path: Path) -> list[int]:
    """Those that have this tokenizer, the parent first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if str(tokenizer_path).encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


async def refusal(grammars: Grammars, schema: Json) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await grammars.matcher(answer_form(schema))
    assert caught.value.param == "response_format"
    return caught.value.message


@pytest.mark.parametrize("case", ENDLESS)
async def test_a_schema_that_takes_too_long_is_refused(case: str, grammars: Grammars) -> None:
    assert "CPU time" in await refusal(grammars, ENDLESS[case])


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
)
async def test_a_ref_that_leads_back_to_itself_is_refused_with_a_sentence(
    grammars: Grammars, schema: Json
) -> None:
    assert "`$ref` refers to itself" in await refusal(grammars, schema)


async def test_such_a_ref_further_inside_ends_its_own_request_with_a_sentence(
    grammars: Grammars, tokenizer: ModelTokenizer
) -> None:
    inside = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}
    matcher = await grammars.matcher(answer_form(inside))
    head = tokenizer.encode_text('<|channel|>final<|message|>{"a":', allow_special=True)
    assert await allowed_after(matcher, head) is None
    assert matcher.error is not None
    assert "`$ref` refers to itself" in matcher.error.message


async def test_more_slow_schemas_than_processes_keep_no_running_answer_waiting(
    grammars: Grammars, tokenizer: ModelTokenizer
) -> None:
    head = tokenizer.encode_text('<|channel|>final<|message|>{"a":{"b":"x', allow_special=True)
    running = [await grammars.matcher(answer_form({"const": i})) for i in range(12)]
    schemas: list[Json] = [{"type": "integer", "multipleOf": 1000003 + 10 * i} for i in range(9)]
    slow = [asyncio.create_task(refusal(grammars, schema)) for schema in schemas]
    waits_s, all_began_s = [], time.monotonic()
    while not all(task.done() for task in slow):
        for matcher in running:
            began_s = time.monotonic()
            assert await allowed_after(matcher, head[:3]) is not None
            waits_s.append(time.monotonic() - began_s)
    assert all("CPU time" in message for message in await asyncio.gather(*slow))
    assert max(waits_s) < (time.monotonic() - all_began_s) / 3
    assert all(matcher.error is None for matcher in running)


async def test_a_form_that_is_too_large_to_pass_on_is_refused(grammars: Grammars) -> None:
    assert await refusal(grammars, {"enum": ["x" * 300_000]})


async def test_killed_processes_are_replaced_and_no_form_is_refused(
    own: tuple[Grammars, Path], tokenizer: ModelTokenizer
) -> None:
    grammars, path = own
    answer = tokenizer.encode_text('<|channel|>final<|message|>{"a":{"b":"x', allow_special=True)
    form = answer_form(CASES["nested"])
    other, matcher = await grammars.matcher(form), await grammars.matcher(form)
    masks = [await allowed_after(other, answer[:end]) for end in range(12)]
    parent, *children = processes(path)
    serving = [process for process in children if int(state_of(process)[1]) != parent]
    for i, killed in enumerate((serving, children, [parent], processes(path))):
        for process in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        await until(lambda killed=killed: not any(is_running(process) for process in killed))  # type: ignore[misc]  # of a loop
        for end in range(3 * i, 3 * i + 3):  # no reply is an earlier call's
            after = await allowed_after(matcher, answer[:end])
            assert matcher.error is None
            assert np.array_equal(masks[end], after)  # type: ignore[arg-type]  # not None
        assert (await grammars.matcher(answer_form({"const": 2}))).allowed is not None


async def test_a_parent_that_hangs_is_replaced(
    own: tuple[Grammars, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, path = own
    monkeypatch.setattr(grammar, "_HUNG_S", scaled(1.0))
    (parent,) = processes(path)
    signal_process(parent, signal.SIGSTOP)
    assert (await grammars.matcher(answer_form({"const": 1}))).allowed is not None
    assert not is_running(parent)


async def test_what_the_system_kills_again_is_no_schemas_fault(own: tuple[Grammars, Path]) -> None:
    grammars, path = own
    await grammars.matcher(answer_form({"const": 1}))
    compiling = asyncio.create_task(grammars.matcher(answer_form(ENDLESS["slow"])))
    killed, parent = set[int](), processes(path)[0]
    while not compiling.done():
        for process in processes(path)[1:]:
            state, parent_of = state_of(process)
            if process not in killed and state == "R" and int(parent_of) != parent:  # it compiles
                os.kill(process, signal.SIGKILL)
                killed.add(process)
        await asyncio.sleep(0.001)
    with pytest.raises(NotReady) as failed:
        await compiling
    assert (failed.value.status, failed.value.retry_after_s) == (503, 1.0)
    assert killed


async def test_a_process_without_memory_for_a_message_leaves_none_of_it_to_the_next(
    own: tuple[Grammars, Path], tokenizer: ModelTokenizer
) -> None:
    grammars, path = own
    form = answer_form({"type": "string"})
    for _ in range(8):  # one in each process
        await grammars.matcher(form)
    parent, *children = processes(path)
    for process in children:
        if int(state_of(process)[1]) != parent:  # it has answers
            resource.prlimit(process, resource.RLIMIT_DATA, (1, 1))
    long = tokenizer.encode_text('<|channel|>final<|message|>"' + "ab " * 75_000, allow_special=True)
    for _ in range(8):
        assert (await grammars.matcher(form, long)).allowed is not None


def state_of(process: int) -> list[str]:
    """As in /proc, R if it runs, and its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return ["", "0"]


async def test_without_processes_a_form_is_refused_for_now(own: tuple[Grammars, Path]) -> None:
    grammars, path = own
    matcher = await grammars.matcher(answer_form({"const": 1}))
    path.unlink()
    for process in processes(path):
        os.kill(process, signal.SIGKILL)
    await allowed_after(matcher, [])
    assert isinstance(matcher.error, NotReady)
    with pytest.raises(NotReady) as refused:
        await grammars.matcher(answer_form({"const": 2}))
    assert refused.value.retry_after_s == 1.0


async def test_a_parent_that_ends_when_it_is_asked_costs_no_descriptor(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("socket.send_fds", broken)
    with pytest.raises(NotReady):  # and without a warning that a socket is not closed
        await grammars.matcher(answer_form({"const": 1}))


async def test_no_process_outlives_the_engine(own: tuple[Grammars, Path]) -> None:
    grammars, path = own
    await grammars.matcher(answer_form({}))
    parent, *children = processes(path)
    signal_process(children[-1], signal.SIGSTOP)
    grammars.close()
    assert not Path(f"/proc/{parent}").exists()
    os.kill(children[-1], signal.SIGCONT)
    await until(lambda: not processes(path))


async def test_a_form_that_compiles_when_the_engine_stops_starts_no_process(
    own: tuple[Grammars, Path],
) -> None:
    grammars, path = own
    compiling = asyncio.create_task(grammars.matcher(answer_form(ENDLESS["slow"])))
    await asyncio.sleep(0.1)  # it is in the process, or not yet: the result is the same
    grammars.close()
    with pytest.raises(NotReady):
        await compiling
    await until(lambda: not processes(path))


def test_a_tokenizer_that_does_not_fit_the_model_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="vocab"):
        Grammars(DEMO, 10)
