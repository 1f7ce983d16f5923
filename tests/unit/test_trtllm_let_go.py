"""An abandoned request of TensorRT-LLM: aborted after its first response, or the engine is wedged."""

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

from workers.engines.trtllm.calls import Abort, Call, let_go
from workers.engines.trtllm.requests import Requests

from tests.clock import run_jumping
from tests.planes import a_request


class Receiving:
    """A result whose response arrives when `has_arrived` is set."""

    request_id = 1
    cached_tokens = 0

    def __init__(self) -> None:
        self.outputs: list[Any] = [SimpleNamespace(finish_reason=None)]
        self.has_arrived = asyncio.Event()
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1

    async def __anext__(self) -> "Receiving":
        await self.has_arrived.wait()
        return self


def abandoned() -> tuple[Receiving, Call]:
    result = Receiving()
    return result, Call(a_request(), result, deadline=0.0, abort=Abort.ONCE_ANSWERED)


async def test_the_rest_is_aborted_once_the_kv_has_arrived() -> None:
    wedged: list[str] = []
    result, call = abandoned()
    letting_go = asyncio.create_task(let_go(call, 60, wedged.append))
    await asyncio.sleep(0)  # it waits for the response
    assert result.num_aborts == 0
    result.has_arrived.set()
    await letting_go
    assert result.num_aborts == 1
    assert wedged == []


async def test_a_transfer_that_does_not_end_has_wedged_the_engine_and_is_not_aborted() -> None:
    wedged: list[str] = []
    result, call = abandoned()
    await let_go(call, 0.01, wedged.append)
    assert wedged == ["request r1 did not end within 0.01 s after it was abandoned"]
    assert result.num_aborts == 0


async def test_stopping_ends_it_even_if_it_has_only_just_been_abandoned() -> None:
    before = asyncio.all_tasks()
    lib: Any = SimpleNamespace(request_error=RuntimeError)
    requests = Requests(lib, kv_timeout_s=60, options={})
    requests.open.llm = SimpleNamespace(generate_async=lambda *_, **__: Receiving())
    async with requests.opened(a_request(), None, None, Abort.ONCE_ANSWERED):
        pass  # the client leaves
    await requests.stop()
    assert asyncio.all_tasks() == before


def test_a_transfer_has_the_kv_timeout_and_minutes_in_the_queue_before_the_engine_counts_as_wedged() -> None:
    async def main() -> None:
        lib: Any = SimpleNamespace(request_error=RuntimeError)
        requests = Requests(lib, kv_timeout_s=60, options={})
        requests.open.llm = SimpleNamespace(generate_async=lambda *_, **__: Receiving())
        async with requests.opened(a_request(), None, None, Abort.ONCE_ANSWERED):
            pass  # the client leaves
        await asyncio.sleep(60 + 590)  # in the clock of the test
        assert not requests.open.broke.is_set()
        await asyncio.sleep(60)
        assert requests.open.broke.is_set()
        assert not requests.open.calls

    run_jumping(main())


async def test_an_abandoned_request_that_has_ended_is_forgotten() -> None:
    lib: Any = SimpleNamespace(request_error=RuntimeError)
    requests, result = Requests(lib, kv_timeout_s=60, options={}), Receiving()
    requests.open.llm = SimpleNamespace(generate_async=lambda *_, **__: result)
    async with requests.opened(a_request(), None, None, Abort.ONCE_ANSWERED):
        pass  # the client leaves
    (letting_go,) = asyncio.all_tasks() - {asyncio.current_task()}
    result.has_arrived.set()
    await asyncio.wait([letting_go])
    await asyncio.sleep(0)  # what follows a task's end
    assert not requests.open.calls
    kept = weakref.ref(letting_go)
    del letting_go
    gc.collect()
    assert kept() is None
