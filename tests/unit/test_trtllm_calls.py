"""One request inside TensorRT-LLM: when it may be aborted, how it ends, and what its errors become."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from workers.engines.trtllm.calls import Abort, Call, as_error

from baton.errors import BatonError, EngineFailure, HandoffFailed, InvalidRequest
from baton.messages import Guided, MessageForm
from tests.planes import a_request


class Result:
    """A result whose next response is one with this finish reason, or an error."""

    request_id = 1
    cached_tokens = 0

    def __init__(self, response: str | Exception | None = None) -> None:
        self.outputs: list[Any] = []
        self.num_aborts = 0
        self._response = response

    def abort(self) -> None:
        self.num_aborts += 1

    async def __anext__(self) -> "Result":
        if isinstance(self._response, Exception):
            raise self._response
        self.outputs = [SimpleNamespace(finish_reason=self._response)]
        return self


def stepped(result: Result, abort: Abort) -> Call:
    """A call after one response or error."""

    async def main() -> Call:
        call = Call(a_request(), result, deadline=asyncio.get_running_loop().time() + 600, abort=abort)
        with contextlib.suppress(OSError, AssertionError):
            await call.step()
        return call

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("response", "abort", "num_aborts"),
    [
        (None, Abort.ANY_TIME, 1),
        (None, Abort.ONCE_ANSWERED, 1),
        (None, Abort.UNTIL_ANSWERED, 0),  # its KV may be on the way
        ("stop", Abort.ANY_TIME, 0),
        (OSError("broken"), Abort.ANY_TIME, 0),  # nothing is left to abort
        (AssertionError("rejected"), Abort.ANY_TIME, 1),  # it goes on
        (AssertionError("rejected"), Abort.ONCE_ANSWERED, 1),
        (AssertionError("rejected"), Abort.UNTIL_ANSWERED, 0),
    ],
)
def test_after_a_response_it_is_aborted_once_if_that_is_safe(
    response: str | Exception | None, abort: Abort, num_aborts: int
) -> None:
    result = Result(response)
    call = stepped(result, abort)
    assert call.abort_if_safe()
    assert call.abort_if_safe()
    assert result.num_aborts == num_aborts


@pytest.mark.parametrize(
    ("abort", "is_aborted"),
    [(Abort.ANY_TIME, True), (Abort.UNTIL_ANSWERED, True), (Abort.ONCE_ANSWERED, False)],
)
def test_before_its_first_response_only_one_that_receives_kv_is_left_alone(
    abort: Abort, is_aborted: bool
) -> None:
    result = Result()
    call = Call(a_request(), result, deadline=0.0, abort=abort)
    assert call.abort_if_safe() == is_aborted
    assert result.num_aborts == is_aborted


async def test_it_is_pinned_until_its_time_is_over() -> None:
    call = Call(a_request(), Result(), deadline=0.0)
    was_pinned: list[bool] = []
    asyncio.get_running_loop().call_soon(lambda: was_pinned.append(call.is_pinned))
    with pytest.raises(HandoffFailed):
        await call.stay_pinned(0.01)
    assert (was_pinned, call.is_pinned) == ([True], False)


@pytest.mark.parametrize(
    ("token_ids", "min_tokens", "num_generated", "ignore_eos", "ends"),
    [
        ([5, 9], 0, 0, False, True),
        ([9, 5], 0, 0, False, False),
        ([], 0, 0, False, False),
        ([5, 9], 0, 0, True, False),
        ([5, 9], 2, 0, False, False),  # it was banned: an ordinary token
        ([5, 9], 2, 1, False, True),
    ],
)
def test_a_stop_token_ends_the_answer_from_its_least_length_on(
    token_ids: list[int], min_tokens: int, num_generated: int, ignore_eos: bool, ends: bool
) -> None:
    asked = replace(a_request().sampling, stop_token_ids=(9,), min_tokens=min_tokens, ignore_eos=ignore_eos)
    request = replace(a_request(), sampling=asked, num_generated=num_generated)
    output: Any = SimpleNamespace(token_ids=token_ids)
    assert Call(request, Result(), deadline=0.0).ends_with_stop_token(output) == ends


def test_an_error_before_the_kv_has_arrived_is_the_handoffs() -> None:
    waiting = Call(a_request(), Result(), deadline=0.0, abort=Abort.ONCE_ANSWERED)
    assert isinstance(as_error(OSError("cut"), waiting), HandoffFailed)
    waiting.has_answered = True
    assert isinstance(as_error(OSError("cut"), waiting), EngineFailure)
    assert "OSError" in as_error(OSError(), waiting).message


def form_of(param: str) -> MessageForm:
    grammar = None if param == "free text" else "{}"
    return MessageForm(headers=("h",), grammar=grammar, end="e", param=param)


@pytest.mark.parametrize(
    ("params", "text", "kind", "param"),
    [
        (["tools[0]"], "Guided decoding error: bad schema", InvalidRequest, "tools[0]"),
        (["tools[0]", "tools[1]"], "Guided decoding error: bad schema", InvalidRequest, None),
        (["tools[0]", "free text"], "Guided decoding error: bad schema", InvalidRequest, "tools[0]"),
        (["tools[0]"], "Guided decoding error: internal error", EngineFailure, None),
        (["tools[0]"], "out of memory", EngineFailure, None),
        ([], "Guided decoding error: bad schema", EngineFailure, None),
    ],
)
def test_only_a_form_that_does_not_compile_is_the_clients_fault(
    params: list[str], text: str, kind: type[BatonError], param: str | None
) -> None:
    form = Guided(last=tuple(map(form_of, params))) if params else None
    request = replace(a_request(), sampling=replace(a_request().sampling, guided=form))
    error = as_error(RuntimeError(text), Call(request, Result(), deadline=0.0))
    assert (type(error), getattr(error, "param", None)) == (kind, param)
