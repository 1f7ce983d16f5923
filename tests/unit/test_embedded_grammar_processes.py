"""A slow or broken schema costs only its own request, since each has its own processes."""

import asyncio
import contextlib
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from baton.errors import InvalidRequest, Overloaded
from baton.messages import Guided
from frontend.text.tokenizer import ModelTokenizer
from tests.alive import is_running
from tests.guided import ENDLESS, Json, answer_form, slow_inside
from tests.waiting import signal_process, until
from workers.engines.embedded.grammar import Grammars
from workers.engines.embedded.grammar_server import BUSY, MAX_MESSAGE_BYTES, Read, _hold_answer

DEMO = Path("models/demo")
VOCAB_SIZE = 3200


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(DEMO)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars.load(DEMO, VOCAB_SIZE)
    yield grammars
    grammars.close()


async def refusal(grammars: Grammars, schema: Json) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await grammars.matcher(answer_form(schema))
    assert caught.value.param == "response_format"
    return caught.value.message


@pytest.mark.parametrize("case", ENDLESS)
def test_a_schema_that_takes_too_long_is_refused(case: str, grammars: Grammars) -> None:
    assert "CPU time" in asyncio.run(refusal(grammars, ENDLESS[case]))


def test_a_form_that_is_too_large_to_pass_on_is_refused(grammars: Grammars) -> None:
    form = answer_form({"const": 1})
    headers = ("x" * MAX_MESSAGE_BYTES,)  # as of a thousand tools
    large = replace(form, last=tuple(replace(message, headers=headers) for message in form.last))
    with pytest.raises(InvalidRequest, match=f"exceed {MAX_MESSAGE_BYTES} bytes") as caught:
        asyncio.run(grammars.matcher(large))
    assert caught.value.param == "response_format"


def test_what_was_refused_once_is_refused_at_once(grammars: Grammars) -> None:
    async def main() -> None:
        schema: Json = {"type": "integer", "multipleOf": 1000033}
        first = await refusal(grammars, schema)
        other = asyncio.create_task(grammars.matcher(answer_form({"const": "begun before"})))
        await asyncio.sleep(0)
        assert await refusal(grammars, schema) == first
        assert not other.done()
        await other

    asyncio.run(main())


class Refusing:
    """In place of the process: refuses every form, and counts how often each was compiled."""

    def __init__(self) -> None:
        self.num_compiled: Counter[Guided] = Counter()

    async def compile(self, form: Guided) -> InvalidRequest:
        self.num_compiled[form] += 1
        return InvalidRequest("no", param="p")

    def close(self) -> None:
        """Nothing runs."""


def test_the_forms_that_were_used_last_are_kept() -> None:
    async def main() -> None:
        server: Any = Refusing()
        grammars = Grammars(server, VOCAB_SIZE)
        forms = [answer_form({"const": number}) for number in range(33)]
        for form in (*forms[:32], forms[0], forms[32], forms[0], forms[2], forms[1]):
            with pytest.raises(InvalidRequest, match="no") as caught:
                await grammars.matcher(form)
            assert caught.value.param == "p"
        assert server.num_compiled == {form: 1 + (form is forms[1]) for form in forms}
        grammars.close()

    asyncio.run(main())


@pytest.fixture
def silent() -> Iterator[tuple[Any, socket.socket]]:
    """In place of the process: one whose forms compile, and the socket that it does not serve."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    class Silent:
        num_compiled = 0

        async def compile(self, _: Guided) -> socket.socket:
            self.num_compiled += 1
            return ours

        def close(self) -> None:
            """Nothing runs."""

    with ours, theirs:
        theirs.setblocking(False)
        yield Silent(), theirs


async def handed_over(theirs: socket.socket) -> socket.socket:
    """The socket of an answer that waits for its process."""
    received: list[socket.socket] = []

    def arrived() -> bool:
        with contextlib.suppress(BlockingIOError):
            _, (fileno,), _, _ = socket.recv_fds(theirs, 1, 1)
            received.append(socket.socket(fileno=fileno))
        return bool(received)

    await until(arrived)
    return received[0]


@contextlib.asynccontextmanager
async def asked(
    silent: tuple[Any, socket.socket],
) -> AsyncIterator[tuple["asyncio.Task[Any]", socket.socket]]:
    """A request for a matcher, and the end on which it is answered; its own end must be closed afterwards."""
    server, theirs = silent
    grammars = Grammars(server, VOCAB_SIZE)
    asking = asyncio.create_task(grammars.matcher(answer_form({})))
    with await handed_over(theirs) as answer:
        yield asking, answer
        answer.setblocking(False)
        assert answer.recv(1) == b""
    grammars.close()


def test_a_client_that_leaves_while_its_form_is_not_served_leaves_nothing(
    silent: tuple[Any, socket.socket],
) -> None:
    async def main() -> None:
        async with asked(silent) as (asking, _):
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()

    asyncio.run(main())


@pytest.mark.parametrize(("says", "num_compiled"), [(BUSY, 1), (b"", 2), (b"?", 2)])
def test_a_form_that_no_process_can_serve_is_refused_for_now(
    says: bytes, num_compiled: int, silent: tuple[Any, socket.socket]
) -> None:
    async def main() -> None:
        async with asked(silent) as (asking, answer):
            if says:
                answer.send(says)
            else:
                answer.shutdown(socket.SHUT_RDWR)
            with pytest.raises(Overloaded, match="No process"):
                await asking
        assert silent[0].num_compiled == num_compiled

    asyncio.run(main())


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
)
def test_a_ref_that_leads_back_to_itself_is_refused_with_a_sentence(grammars: Grammars, schema: Json) -> None:
    assert "`$ref` refers to itself" in asyncio.run(refusal(grammars, schema))


def test_such_a_ref_further_inside_ends_its_own_request_with_a_sentence(
    grammars: Grammars, tokenizer: ModelTokenizer
) -> None:
    inside = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}
    matcher = asyncio.run(grammars.matcher(answer_form(inside)))
    head = tokenizer.encode_text('<|channel|>final<|message|>{"a":', allow_special=True)
    assert matcher.allowed(head, 0) is None
    assert matcher.error is not None
    assert "`$ref` refers to itself" in matcher.error.message


def test_an_answer_whose_next_step_takes_too_long_ends_alone(
    grammars: Grammars, tokenizer: ModelTokenizer
) -> None:
    head = tokenizer.encode_text('<|channel|>final<|message|>{"a":1,"b":', allow_special=True)
    slow, other = (asyncio.run(grammars.matcher(answer_form(slow_inside()))) for _ in range(2))
    slow.ask(head, 0)
    assert other.allowed(head[:-1], 0) is not None
    assert slow.allowed(head, 0) is None
    assert isinstance(slow.error, InvalidRequest)
    assert "CPU time" in slow.error.message
    assert other.error is None


class CpuTimeLeft:
    """A stand-in for an LLMatcher without work, whose masks are the CPU time that a step may take."""

    def __init__(self) -> None:
        self.left_s: list[float] = []

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        return len(token_ids)

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False

    def compute_bitmask(self) -> bytes:
        self.left_s.append(signal.getitimer(signal.ITIMER_PROF)[0])
        return b"\xff"


def test_quick_steps_do_not_save_up_cpu_time_for_a_slow_one() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    matcher = CpuTimeLeft()
    with ours, theirs:
        for _ in range(50):
            theirs.send(msgspec.msgpack.encode(Read(b"", asks=True)))
        theirs.shutdown(socket.SHUT_WR)
        _hold_answer(ours, matcher)  # type: ignore[arg-type]  # a stand-in
    assert len(matcher.left_s) == 50
    assert max(matcher.left_s) < 1.1


def servers(tokenizer_path: Path) -> list[int]:
    """The processes that hold forms for this tokenizer."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if str(tokenizer_path).encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Grammars, Path]]:
    """Grammars whose processes can be told apart from other tests', by the tokenizer's path."""
    path = tmp_path / "tokenizer.json"
    path.symlink_to((DEMO / "tokenizer.json").resolve())
    grammars = Grammars.load(tmp_path, VOCAB_SIZE)
    yield grammars, path
    grammars.close()


def test_many_slow_schemas_at_once_keep_no_other_waiting(own: tuple[Grammars, Path]) -> None:
    grammars, path = own

    async def main() -> None:
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

    asyncio.run(main())


def test_forms_are_compiled_once(own: tuple[Grammars, Path]) -> None:
    grammars, path = own

    async def main() -> None:
        [server] = servers(path)
        await asyncio.gather(*[grammars.matcher(answer_form({"const": "once"})) for _ in range(5)])
        await until(lambda: len(servers(path)) == 2)  # the server, and its fork for the form
        signal_process(server, signal.SIGSTOP)
        try:
            matcher = await grammars.matcher(answer_form({"const": "once"}))
        finally:
            os.kill(server, signal.SIGCONT)
        assert matcher.allowed([], 0) is not None

    asyncio.run(main())


def test_a_killed_grammar_process_is_replaced(own: tuple[Grammars, Path]) -> None:
    grammars, path = own

    async def main() -> None:
        await grammars.matcher(answer_form({"const": 1}))
        killed = servers(path)
        for process in killed:
            with contextlib.suppress(ProcessLookupError):  # the answer's ends with its matcher
                os.kill(process, signal.SIGKILL)
        await until(lambda: not any(is_running(process) for process in killed))
        for value in (1, 2):
            assert (await grammars.matcher(answer_form({"const": value}))).allowed([], 0) is not None

    asyncio.run(main())


def test_a_client_that_leaves_ends_no_compilation_that_others_wait_for(own: tuple[Grammars, Path]) -> None:
    grammars, _ = own

    async def main() -> None:
        form = answer_form({"const": "shared"})
        leaving, staying = (asyncio.create_task(grammars.matcher(form)) for _ in range(2))
        await asyncio.sleep(0)  # both wait now
        leaving.cancel()
        assert (await staying).allowed([], 0) is not None

    asyncio.run(main())


def test_a_form_is_not_blamed_for_a_killed_process(own: tuple[Grammars, Path]) -> None:
    grammars, path = own

    async def main() -> None:
        [server] = servers(path)
        signal_process(server, signal.SIGSTOP)
        asked = asyncio.create_task(grammars.matcher(answer_form({"const": 1})))
        for _ in range(10):
            await asyncio.sleep(0)  # until the form is sent
        os.kill(server, signal.SIGKILL)
        with pytest.raises(Overloaded):
            await asked

    asyncio.run(main())


def test_a_form_whose_process_does_not_answer_any_more_is_compiled_again(own: tuple[Grammars, Path]) -> None:
    grammars, path = own

    async def main() -> None:
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

    asyncio.run(main())


def test_no_process_outlives_its_answer_or_the_engine(own: tuple[Grammars, Path]) -> None:
    grammars, path = own

    async def main() -> None:
        matcher = await grammars.matcher(answer_form({"const": 1}))
        assert matcher.allowed([], 0) is not None
        assert len(servers(path)) == 3
        matcher.close()
        await until(lambda: len(servers(path)) == 2)
        grammars.close()
        await until(lambda: not servers(path))

    asyncio.run(main())


def test_a_tokenizer_that_does_not_fit_the_model_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="vocab"):
        Grammars.load(DEMO, 10)
