"""The open requests of vLLM: what ends with them, and which a failed transfer ends."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton.errors import DeadlineExceeded, HandoffFailed
from tests.planes import a_request
from workers.engines.vllm.calls import Calls
from workers.engines.vllm.figures import Figures


class Llm:
    """Yields one result for each request, then waits."""

    def __init__(self) -> None:
        self.num_open = 0

    async def generate(self, *_: object, **__: object) -> AsyncGenerator[Any, None]:
        self.num_open += 1
        try:
            yield "result"
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1


def calls_of(llm: Llm) -> Calls:
    lib: Any = SimpleNamespace(dead=RuntimeError)
    calls = Calls(lib)
    calls.open.llm = llm
    return calls


def test_a_request_that_is_left_ends_in_vllm_at_once() -> None:
    async def main() -> None:
        calls = calls_of(llm := Llm())
        async with calls.opened(a_request(), None, 0) as call:
            await calls.step(call)
            assert llm.num_open == 1
        assert llm.num_open == 0  # although `call` still refers to it
        assert not calls.open.calls

    asyncio.run(main())


def test_a_failed_transfer_ends_requests_that_may_have_found_what_it_left() -> None:
    async def main() -> None:
        calls = calls_of(Llm())
        plain = msgspec.structs.replace(a_request(), handoff=None)
        soon = msgspec.structs.replace(a_request(), deadline_s=0.05)
        async with (
            calls.opened(plain, None, 0) as without,
            calls.opened(a_request(), None, 0) as waiting,
            calls.opened(soon, None, 0) as answered,
        ):
            await calls.step(answered)
            assert calls.salt(plain) == ""
            calls.fail_pulls()
            for call in (without, waiting):
                with pytest.raises(HandoffFailed):
                    await calls.step(call)
            with pytest.raises(DeadlineExceeded):
                await calls.step(answered)
            salted = msgspec.structs.replace(plain, cache_salt="own")
            salts = {calls.salt(plain), calls.salt(salted)}
            calls.fail_pulls()
            assert len(salts | {calls.salt(plain), calls.salt(salted), "", "own"}) == 6

    asyncio.run(main())


def test_pins_that_vllm_does_not_report_yet_leave_no_negative_use() -> None:
    figures = Figures(lambda: None)
    figures.num_blocks = 100
    figures.pinned["r1"] = 5
    stats = figures.stats()
    assert (stats.kv_used_blocks, stats.kv_pinned_blocks) == (0, 5)
