"""The open requests of vLLM: what ends with them, and which a failed transfer ends."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from workers.engines.vllm.calls import Calls

from baton.errors import DeadlineExceeded, EngineFailure, HandoffFailed, InvalidRequest, WorkerLost
from tests.clock import jumping
from tests.planes import a_request


class Llm:
    """Yields one result for each request, then waits; `dies_of` is raised instead."""

    def __init__(self, dies_of: Exception | None = None) -> None:
        self.num_open = 0
        self.given: list[tuple[dict[str, Any], str, int | None]] = []
        self._dies_of = dies_of

    async def generate(
        self, prompt: dict[str, Any], _: object, request_id: str, *, priority: int | None = None
    ) -> AsyncGenerator[Any, None]:
        self.num_open += 1
        self.given.append((prompt, request_id, priority))
        try:
            if self._dies_of is not None:
                raise self._dies_of
            yield "result"
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1


def calls_of(llm: Llm) -> Calls:
    lib: Any = SimpleNamespace(dead=RuntimeError)
    calls = Calls(lib)
    calls.open.llm = llm
    return calls


async def test_a_request_that_is_left_ends_in_vllm_at_once() -> None:
    calls = calls_of(llm := Llm())
    async with calls.opened(a_request(), None, 0) as call:
        await calls.step(call)
        assert llm.num_open == 1
    assert llm.num_open == 0  # although `call` still refers to it
    assert not calls.open.calls


async def test_vllm_is_given_the_salt_and_the_place_and_no_id_twice() -> None:
    calls = calls_of(llm := Llm())
    plain = msgspec.structs.replace(a_request(), cache_salt="")
    salted = msgspec.structs.replace(plain, cache_salt="own")
    async with calls.opened(plain, None, 3) as first, calls.opened(salted, None, -4) as second:
        await calls.step(first)
        await calls.step(second)
    prompt = {"prompt_token_ids": plain.token_ids}
    assert llm.given == [(prompt, "r1-1", 3), (prompt | {"cache_salt": "own"}, "r1-2", -4)]


async def test_a_request_that_meets_a_dead_core_ends_all_others() -> None:
    calls = calls_of(Llm(dies_of=RuntimeError("out of memory")))
    async with calls.opened(a_request(), None, 0) as call:
        with pytest.raises(WorkerLost, match="vLLM's engine core died: out of memory"):
            await calls.step(call)
    assert calls.open.broke.is_set()


async def test_a_request_that_vllm_fails_on_tells_the_cause_and_ends_alone() -> None:
    wrapper = KeyError("generation failed")
    wrapper.__cause__ = OSError("no such page")
    calls = calls_of(Llm(dies_of=wrapper))
    async with calls.opened(a_request(), None, 0) as call:
        with pytest.raises(EngineFailure, match=r"on this request: .*no such page"):
            await calls.step(call)
    assert not calls.open.broke.is_set()


async def test_what_vllm_refuses_is_the_clients_fault_and_ends_alone() -> None:
    calls = calls_of(Llm(dies_of=ValueError("the prompt is too long")))
    async with calls.opened(a_request(), None, 0) as call:
        with pytest.raises(InvalidRequest, match="vLLM refuses the request: the prompt is too long"):
            await calls.step(call)
    assert not calls.open.broke.is_set()


@jumping
async def test_a_request_ends_at_its_deadline_which_counts_from_its_submission() -> None:
    calls = calls_of(Llm())
    async with calls.opened(msgspec.structs.replace(a_request(), deadline_s=30), None, 0) as call:
        await calls.step(call)
        await asyncio.sleep(10)  # in the clock of the test
        with pytest.raises(DeadlineExceeded):
            await calls.step(call)
        assert asyncio.get_running_loop().time() == pytest.approx(30, abs=0.1)


class Dying(Llm):
    """Is healthy at first."""

    num_checks = 0

    async def check_health(self) -> None:
        self.num_checks += 1
        if self.num_checks == 3:
            raise RuntimeError("out of memory")


@jumping
async def test_a_core_that_dies_is_noticed_within_seconds_without_a_request() -> None:
    calls = calls_of(Dying())
    async with calls.opened(a_request(), None, 0) as call:
        await calls.step(call)
        await calls.watch()
        assert asyncio.get_running_loop().time() < 5  # in the clock of the test
        assert "out of memory" in calls.open.reason
        with pytest.raises(WorkerLost):
            await calls.step(call)


async def test_a_failed_transfer_ends_requests_that_may_have_found_what_it_left() -> None:
    calls = calls_of(llm := Llm())
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
        async with calls.opened(plain, None, 0) as later:
            await calls.step(later)
        assert llm.given[-1][0]["cache_salt"] == calls.salt(plain)
        calls.fail_pulls()
        assert len(salts | {calls.salt(plain), calls.salt(salted), "", "own"}) == 6
