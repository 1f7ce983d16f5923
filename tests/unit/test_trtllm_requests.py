"""Requests that TensorRT-LLM refuses, or that end with it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailure,
    HandoffFailed,
    InvalidRequest,
    WorkerLost,
)
from tests.clock import run_jumping
from tests.planes import a_request
from workers.engines.trtllm.calls import Abort
from workers.engines.trtllm.requests import Requests


def requests_of(generate_async: Any) -> Requests:
    lib: Any = SimpleNamespace(request_error=KeyError, takes=lambda _: True)
    requests = Requests(lib, kv_timeout_s=60, options={})
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
def test_a_refusal_is_blamed_on_the_request_its_handoff_or_the_engine(
    error: Exception, abort: Abort, told: type[BatonError], breaks: bool
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise error

    async def main() -> None:
        requests = requests_of(refuses)
        with pytest.raises(told, match=str(error)):
            async with requests.opened(a_request(), None, None, abort):
                pass
        assert requests.open.broke.is_set() == breaks
        assert not requests.open.calls

    asyncio.run(main())


@pytest.mark.parametrize("stops", [False, True], ids=["broke", "stopped"])
@pytest.mark.parametrize("abort", [Abort.ANY_TIME, Abort.ONCE_ANSWERED], ids=str)
def test_nothing_is_aborted_or_waited_for_in_an_engine_that_broke_or_stopped(
    abort: Abort, stops: bool
) -> None:
    aborted: list[bool] = []
    result = SimpleNamespace(request_id=1, abort=lambda: aborted.append(True))

    async def main() -> None:
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

    asyncio.run(main())


class Silent:
    """A result whose response never comes."""

    request_id = 1

    def abort(self) -> None:
        """See `Result`."""

    async def __anext__(self) -> "Silent":
        await asyncio.Event().wait()
        return self


def test_a_request_ends_at_its_deadline_which_counts_from_its_submission() -> None:
    async def main() -> None:
        requests = requests_of(lambda *_, **__: Silent())
        asked = replace(a_request(), deadline_s=30)
        async with requests.opened(asked, None, None, Abort.ANY_TIME) as call:
            await asyncio.sleep(10)  # in the clock of the test
            with pytest.raises(DeadlineExceeded):
                await requests.step(call)
            assert asyncio.get_running_loop().time() == pytest.approx(30, abs=0.1)

    run_jumping(main())
