"""Test calls for any engine: requests, handoffs, tokens."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec

from baton.messages import GenerateRequest, KvHandoff, TokenChunk, Usage
from tests.requests import token_request
from tests.tiny_gpt_oss import prompt
from tests.waiting import PATIENCE_S, until
from workers.engine import Engine

T = TypeVar("T")
E = TypeVar("E", bound=Engine)


def ask(tokens: list[int] | int = 40, **options: Any) -> GenerateRequest:
    """A greedy request for 12 tokens; `options` set fields of the request or its sampling."""
    token_ids = prompt(tokens) if isinstance(tokens, int) else tokens
    return token_request(token_ids, **{"temperature": 0.0} | options)


async def next_handoff(replies: AsyncGenerator[KvHandoff | TokenChunk, None]) -> KvHandoff:
    async with asyncio.timeout(PATIENCE_S):
        handoff = await anext(replies)
    assert isinstance(handoff, KvHandoff)
    return handoff


def counts(chunk: TokenChunk) -> Usage | None:
    """The chunk's usage without its durations."""
    usage = chunk.usage
    return None if usage is None else Usage(*msgspec.structs.astuple(usage)[:4])


@asynccontextmanager
async def handed_over(engine: Engine, request: GenerateRequest) -> AsyncGenerator[KvHandoff, None]:
    """A handoff whose prefill is closed at the end."""
    async with aclosing(engine.prefill(request)) as replies:
        yield await next_handoff(replies)


async def left_handoff(engine: Engine, request: GenerateRequest) -> KvHandoff:
    """A handoff whose prefill is closed at once."""
    async with handed_over(engine, request) as handoff:
        return handoff


async def chunks(answer: AsyncGenerator[T, None]) -> list[T]:
    async with asyncio.timeout(PATIENCE_S), aclosing(answer):
        return [chunk async for chunk in answer]


async def tokens(answer: AsyncGenerator[TokenChunk, None]) -> list[int]:
    return [token_id for chunk in await chunks(answer) for token_id in chunk.token_ids]


@asynccontextmanager
async def running(*engines: E, may_fail: bool = False) -> AsyncIterator[list[E]]:
    """These, which must hold nothing at the end of the test, unless one has failed that `may_fail`."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.stop)
            await engine.start()
        yield list(engines)
        for engine in engines:
            await until_idle(engine, may_fail=may_fail)


async def until_idle(engine: Engine, *, may_fail: bool = False) -> None:
    """Wait until nothing runs, waits, is held or pinned, or the engine has failed, if it may."""
    failed = asyncio.ensure_future(engine.failed())

    def idle() -> bool:
        stats = engine.stats()
        held = (stats.num_running, stats.num_waiting, stats.kv_used_blocks, stats.kv_pinned_blocks)
        return not any(held) or (may_fail and failed.done())

    await until(idle)
    failed.cancel()
