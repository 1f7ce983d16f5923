"""A slow or broken schema costs only its own request, since each has its own processes."""

import asyncio
import contextlib
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
from tests.clock import jumping
from tests.guided import ENDLESS, Json, answer_form, handed_over, slow_inside
from workers.engines.embedded.grammar import Grammars
from workers.engines.embedded.grammar_server import BUSY, MAX_MESSAGE_BYTES, READY, Read

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
async def test_a_schema_that_takes_too_long_is_refused(case: str, grammars: Grammars) -> None:
    assert "CPU time" in await refusal(grammars, ENDLESS[case])


async def test_a_form_that_is_too_large_to_pass_on_is_refused(grammars: Grammars) -> None:
    form = answer_form({"const": 1})
    headers = ("x" * MAX_MESSAGE_BYTES,)  # as of a thousand tools
    large = replace(form, last=tuple(replace(message, headers=headers) for message in form.last))
    with pytest.raises(InvalidRequest, match=f"exceed {MAX_MESSAGE_BYTES} bytes") as caught:
        await grammars.matcher(large)
    assert caught.value.param == "response_format"


async def test_what_was_refused_once_is_refused_at_once(grammars: Grammars) -> None:
    schema: Json = {"type": "integer", "multipleOf": 1000033}
    first = await refusal(grammars, schema)
    other = asyncio.create_task(grammars.matcher(answer_form({"const": "begun before"})))
    await asyncio.sleep(0)
    assert await refusal(grammars, schema) == first
    assert not other.done()
    await other


class Refusing:
    """In place of the process: refuses every form, and counts how often each was compiled."""

    def __init__(self) -> None:
        self.num_compiled: Counter[Guided] = Counter()

    async def compile(self, form: Guided) -> InvalidRequest:
        self.num_compiled[form] += 1
        return InvalidRequest("no", param="p")

    def close(self) -> None:
        """Nothing runs."""


async def test_the_forms_that_were_used_last_are_kept() -> None:
    server: Any = Refusing()
    grammars = Grammars(server, VOCAB_SIZE)
    forms = [answer_form({"const": number}) for number in range(33)]
    for form in (*forms[:32], forms[0], forms[32], forms[0], forms[2], forms[1]):
        with pytest.raises(InvalidRequest, match="no") as caught:
            await grammars.matcher(form)
        assert caught.value.param == "p"
    assert server.num_compiled == {form: 1 + (form is forms[1]) for form in forms}
    grammars.close()


class Stuck:
    """In place of the process: refuses forms once it may."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.may_end = asyncio.Event()

    async def compile(self, _: Guided) -> InvalidRequest:
        self.num_begun += 1
        await self.may_end.wait()
        return InvalidRequest("compiled")

    def close(self) -> None:
        """Nothing runs."""


@jumping
async def test_eight_forms_compile_at_once_and_each_takes_a_minute_at_most() -> None:
    server: Any = Stuck()
    grammars = Grammars(server, VOCAB_SIZE)
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    asked = [asyncio.create_task(grammars.matcher(answer_form({"const": i}))) for i in range(9)]
    await asyncio.sleep(59)  # the clock jumps
    assert server.num_begun == 8
    assert not any(each.done() for each in asked)
    await asyncio.sleep(2)
    assert all(each.done() for each in asked)
    for each in asked:
        with pytest.raises(Overloaded) as refused:
            await each
        assert refused.value.retry_after_s == 1.0
    assert server.num_begun == 8
    server.may_end.set()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="compiled"):
            await grammars.matcher(answer_form({"const": 0}))
    assert server.num_begun == 9
    assert problems == []


async def test_a_form_that_is_not_kept_is_held_by_no_process() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first = answer_form({})

    class Serving(Refusing):
        async def compile(self, form: Guided) -> Any:
            return ours if form == first else await super().compile(form)

    async def main() -> None:
        grammars = Grammars(server, VOCAB_SIZE)
        asking = asyncio.create_task(grammars.matcher(first))
        with await handed_over(theirs) as answer:
            answer.send(READY)
            (await asking).close()
        for number in range(32):
            with pytest.raises(InvalidRequest, match="no"):
                await grammars.matcher(answer_form({"const": number}))
        assert theirs.recv(1) == b""

    server: Any = Serving()
    with ours, theirs:
        theirs.setblocking(False)
        await main()


async def test_an_answer_that_is_told_from_its_beginning_keeps_the_event_loop_free(
    silent: tuple[Any, socket.socket],
) -> None:
    async def read(process: socket.socket) -> int:
        num_tokens, loop = 0, asyncio.get_running_loop()
        while message := await loop.sock_recv(process, MAX_MESSAGE_BYTES):
            told = msgspec.msgpack.decode(message, type=Read)
            assert not told.asks
            num_tokens += len(told.token_ids) // 4
        return num_tokens

    server, theirs = silent
    grammars = Grammars(server, VOCAB_SIZE)
    asking = asyncio.create_task(grammars.matcher(answer_form({}), [7] * 200_000))
    with await handed_over(theirs) as process:
        process.setblocking(False)
        process.send(READY)
        reading = asyncio.create_task(read(process))
        (await asking).close()
        assert await reading == 200_000
    grammars.close()


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


async def test_a_client_that_leaves_while_its_form_is_not_served_leaves_nothing(
    silent: tuple[Any, socket.socket],
) -> None:
    async with asked(silent) as (asking, _):
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()


@pytest.mark.parametrize(("says", "num_compiled"), [(BUSY, 1), (b"", 2), (b"?", 2)])
async def test_a_form_that_no_process_can_serve_is_refused_for_now(
    says: bytes, num_compiled: int, silent: tuple[Any, socket.socket]
) -> None:
    async with asked(silent) as (asking, answer):
        if says:
            answer.send(says)
        else:
            answer.shutdown(socket.SHUT_RDWR)
        with pytest.raises(Overloaded, match="No process") as refused:
            await asking
        assert refused.value.retry_after_s == 1.0
    assert silent[0].num_compiled == num_compiled


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
