"""Requests that TensorRT-LLM refuses, or that end with it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.errors import BatonError, EngineFailure, HandoffFailed, InvalidRequest, WorkerLost
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


@pytest.mark.parametrize("abort", [Abort.ANY_TIME, Abort.ONCE_ANSWERED], ids=str)
def test_nothing_is_aborted_or_waited_for_in_an_engine_that_broke(abort: Abort) -> None:
    aborted: list[bool] = []
    result = SimpleNamespace(request_id=1, abort=lambda: aborted.append(True))

    async def main() -> None:
        before = asyncio.all_tasks()
        requests = requests_of(lambda *_, **__: result)
        async with requests.opened(a_request(), None, None, abort):
            requests.open.break_off("a rank died")
        assert not requests.open.calls
        assert asyncio.all_tasks() == before
        assert aborted == []

    asyncio.run(main())
