"""One open call of the engine: its request, its sequence, and its outgoing replies."""

import asyncio
from dataclasses import dataclass, field

from baton.errors import BatonError
from baton.messages import GenerateRequest, KvHandoff, TokenChunk
from workers.engines.embedded.scheduler import Sequence
from workers.kv.transceiver import Ticket


@dataclass(slots=True, eq=False)
class Call:
    """`outbox` gets the request's replies, then the error that ended it or None.

    `transfer` is the task that moves its KV, `ticket` its offer, if any; both end with the call.
    """

    request: GenerateRequest
    sequence: Sequence
    deadline: asyncio.TimerHandle
    outbox: asyncio.Queue[KvHandoff | TokenChunk | BatonError | None] = field(default_factory=asyncio.Queue)
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    transfer: asyncio.Task[None] | None = None
    ticket: Ticket | None = None

    async def next_reply(self) -> KvHandoff | TokenChunk | None:
        """Wait for the next reply; None at the end. Raises the error that ended the request."""
        item = await self.outbox.get()
        if isinstance(item, BatonError):
            raise item
        return item

    async def next_chunk(self) -> TokenChunk | None:
        """`next_reply` for calls without a handoff."""
        reply = await self.next_reply()
        assert not isinstance(reply, KvHandoff)
        return reply
