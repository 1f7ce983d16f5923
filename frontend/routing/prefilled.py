"""A prompt whose KV a prefill worker keeps for decode."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

from baton.errors import BrokerLost, HandoffFailed
from baton.messages import GenerateRequest, KvHandoff, Reply, WorkerInfo


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """What prefill answered `request` with; `prefilling` closes its call, which pins the KV. `decode`: the
    decode worker, if it is already chosen.
    """

    request: GenerateRequest
    handoff: KvHandoff
    pinned: AsyncGenerator[Reply, None]
    prefilling: AsyncExitStack
    decode: WorkerInfo | None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens in the handoff."""
        first = self.handoff.first_chunk
        return (self.handoff.first_token, *(first.token_ids if first else ()))

    async def decoded(self, tokens: AsyncGenerator[Reply, None]) -> Reply | None:
        """Decode's first reply. Raises HandoffFailed as soon as prefill fails, since the KV is lost with it,
        BrokerLost.
        """
        arriving = asyncio.ensure_future(anext(tokens, None))
        moved = asyncio.ensure_future(anext(self.pinned, None))
        try:
            await asyncio.wait((arriving, moved), return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done() and (error := moved.exception()) is not None:
                if isinstance(error, BrokerLost):
                    raise error
                failed = f"The prefill worker failed before the KV was transferred: {error}"
                raise HandoffFailed(failed) from error
            return await arriving
        finally:
            arriving.cancel()
            moved.cancel()
            await asyncio.gather(arriving, moved, return_exceptions=True)
