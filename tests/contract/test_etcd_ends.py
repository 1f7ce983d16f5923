"""How the etcd client's calls end: a watch at the server too, a refusal without another try, one without an
answer in time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest

from baton.etcd_rpc import EtcdError
from tests.contract.test_etcd_answers import KEY, Scripted, client, serving
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_watch_that_is_left_or_refused_ends_at_the_server(is_refused: bool) -> None:
    has_ended = asyncio.Event()

    async def watched() -> AsyncIterator[bytes]:
        try:
            yield b"\x20\x01" if is_refused else b""
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    async with serving(Scripted(watched=watched)) as url, client(url) as rpc:
        async with aclosing(rpc.watch(KEY, 1, None)) as batches:
            outcome = await asyncio.gather(anext(batches), return_exceptions=True)
        async with asyncio.timeout(PATIENCE_S):
            await has_ended.wait()
    assert isinstance(outcome[0], EtcdError) if is_refused else not outcome[0]


async def test_a_refusal_of_a_fresh_token_is_not_tried_again() -> None:
    def answer(method: str, _: dict[str, str]) -> tuple[grpc.StatusCode, str] | bytes:
        return b"\x12\x01t" if method == "Authenticate" else (grpc.StatusCode.PERMISSION_DENIED, "denied")

    handler = Scripted(answer)
    async with serving(handler) as url, client(url, username="root") as rpc:
        with pytest.raises(EtcdError, match="denied"):
            await rpc.call("KV/Range", key=KEY)
    assert [method for method, _ in handler.asked] == ["Authenticate", "Range"]


async def test_a_call_without_an_answer_fails_in_time() -> None:
    handler = Scripted(lambda _method, _metadata: None)
    async with serving(handler) as url, client(url, timeout_s=0.1) as rpc, asyncio.timeout(PATIENCE_S):
        with pytest.raises(EtcdError, match="DEADLINE_EXCEEDED"):
            await rpc.call("KV/Range", key=KEY)
