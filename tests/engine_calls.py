"""Test calls for any engine: take a handoff, read tokens, wait."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.messages import KvHandoff, TokenChunk
from tests.waiting import PATIENCE_S


async def next_handoff(replies: AsyncGenerator[KvHandoff | TokenChunk, None]) -> KvHandoff:
    async with asyncio.timeout(PATIENCE_S):
        handoff = await anext(replies)
    assert isinstance(handoff, KvHandoff)
    return handoff


async def tokens(answer: AsyncGenerator[TokenChunk, None]) -> list[int]:
    async with asyncio.timeout(PATIENCE_S), aclosing(answer):
        return [token_id async for chunk in answer for token_id in chunk.token_ids]
