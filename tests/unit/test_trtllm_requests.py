"""Requests that TensorRT-LLM refuses, or that end with it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from workers.engines.trtllm.calls import Abort
from workers.engines.trtllm.requests import Requests

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailure,
    HandoffFailed,
    InvalidRequest,
    WorkerLost,
)
from tests.clock import jumping
from tests.planes import a_request


def requests_of(generate_async: Any, *, takes_all: bool = True, **options: str) -> Requests:
    lib: Any = SimpleNamespace(request_error=KeyError, takes=lambda _: takes_all)
    requests = Requests(lib, kv_timeout_s=60, options=options)
    requests.open.llm = SimpleNamespace(generate_async=generate_async)
    return requests


@pytest.mark.parametrize(
    ("error", "abort", "told", "breaks"),
    [
        (ValueError("too long"), Abort.ANY_TIME, InvalidRequest, False),
        (NotImplementedError("no beams"), Abort.UNTIL_ANSWERED, InvalidRequest, False),
        (KeyError("too long"), Abort.ANY_TIME, InvalidRequest, False),
        (ValueError("no such endpoint"), Abort.ONCE_ANSWERED, HandoffFailed, False),
        (AssertionError("odd"), Abort.ANY_TIME, EngineFailure, False),
        (RuntimeError("is shutting down"), Abort.ANY_TIME, WorkerLost, True),
    ],
    ids=repr,
)
async def test_a_refusal_is_blamed_on_the_request_its_handoff_or_the_engine(
    error: Exception, abort: Abort, told: type[BatonError], breaks: bool
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise error

    requests = requests_of(refuses)
    with pytest.raises(told, match=str(error)):
        async with requests.opened(a_request(), None, None, abort):
            pass
    assert requests.open.broke.is_set() == breaks
    assert not requests.open.calls


@pytest.mark.parametrize("stops", [False, True], ids=["broke", "stopped"])
@pytest.mark.parametrize("abort", [Abort.ANY_TIME, Abort.ONCE_ANSWERED], ids=str)
async def test_nothing_is_aborted_or_waited_for_in_an_engine_that_broke_or_stopped(
    abort: Abort, stops: bool
) -> None:
    aborted: list[bool] = []
    result = SimpleNamespace(request_id=1, abort=lambda: aborted.append(True))
    before = asyncio.all_tasks()
    requests = requests_of(lambda *_, **__: result)
    async with requests.opened(a_request(), None, None, abort):
        if stops:
            await requests.stop()
        else:
            requests.open.break_off("a rank died")
    assert not requests.open.calls
    assert asyncio.all_tasks() == before
    assert aborted == []


class Silent:
    """A result whose response never comes."""

    request_id = 1

    def abort(self) -> None:
        """See `Result`."""

    async def __anext__(self) -> "Silent":
        await asyncio.Event().wait()
        return self


@jumping
async def test_a_request_ends_at_its_deadline_which_counts_from_its_submission() -> None:
    requests = requests_of(lambda *_, **__: Silent())
    asked = replace(a_request(), deadline_s=30)
    async with requests.opened(asked, None, None, Abort.ANY_TIME) as call:
        await asyncio.sleep(10)  # in the clock of the test
        with pytest.raises(DeadlineExceeded):
            await requests.step(call)
        assert asyncio.get_running_loop().time() == pytest.approx(30, abs=0.1)


@pytest.mark.parametrize(
    ("asked", "abort", "told"),
    [
        ({}, Abort.ANY_TIME, {"streaming": True, "cache_salt": "baton"}),
        ({}, Abort.ONCE_ANSWERED, {"streaming": True, "cache_salt": "baton"}),
        ({}, Abort.UNTIL_ANSWERED, {"streaming": False, "cache_salt": "baton"}),
        ({"cache_salt": "own"}, Abort.ANY_TIME, {"streaming": True, "cache_salt": "own"}),
        ({"priority": 100}, Abort.ANY_TIME, {"streaming": True, "cache_salt": "baton", "priority": 0.0}),
        ({"priority": -50}, Abort.ANY_TIME, {"streaming": True, "cache_salt": "baton", "priority": 0.75}),
    ],
)
async def test_the_engine_is_told_salt_priority_and_whether_to_stream(
    asked: dict[str, Any], abort: Abort, told: dict[str, Any]
) -> None:
    given: list[Any] = []

    def generate_async(*args: Any, **options: Any) -> Silent:
        given.append((*args, options))
        return Silent()

    requests = requests_of(generate_async, cache_salt="baton")
    request = replace(a_request(), **({"cache_salt": "", "priority": 0} | asked))
    async with requests.opened(request, "sampling", "params", abort):
        assert given == [(request.token_ids, "sampling", {"disaggregated_params": "params"} | told)]
    await requests.stop()


async def test_a_priority_that_the_build_cannot_heed_is_refused_by_its_name() -> None:
    requests = requests_of(lambda *_, **__: Silent(), takes_all=False)
    with pytest.raises(InvalidRequest) as refused:
        async with requests.opened(replace(a_request(), priority=1), None, None, Abort.ANY_TIME):
            pass
    assert refused.value.param == "priority"
    async with requests.opened(replace(a_request(), priority=0), None, None, Abort.ANY_TIME):
        pass


class Failing(Silent):
    """A result whose response is this error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def __anext__(self) -> "Silent":
        raise self._error


@pytest.mark.parametrize(
    ("error", "fatal", "told", "breaks"),
    [
        (KeyError("too long"), None, EngineFailure, False),
        (AssertionError("odd"), None, EngineFailure, False),
        (KeyError("shut down"), "a rank died", WorkerLost, True),
        (AssertionError("odd"), "a rank died", WorkerLost, True),
        (OSError("broken pipe"), None, WorkerLost, True),
    ],
    ids=repr,
)
async def test_an_error_breaks_the_engine_if_it_is_fatal_or_of_no_one_request(
    error: Exception, fatal: str | None, told: type[BatonError], breaks: bool
) -> None:
    requests = requests_of(lambda *_, **__: Failing(error))
    requests.open.llm._executor = SimpleNamespace(_fatal_error=fatal)  # noqa: SLF001  TensorRT-LLM's
    async with requests.opened(a_request(), None, None, Abort.ANY_TIME) as call:
        with pytest.raises(told, match=fatal or str(error)):
            await requests.step(call)
    assert requests.open.broke.is_set() == breaks
