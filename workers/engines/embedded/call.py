"""One open generator of the engine: its request, its sequence, and the replies on their way to it."""

import asyncio
from dataclasses import dataclass, field

from baton.errors import BatonError
from baton.messages import GenerateRequest, KvHandoff, TokenChunk
from workers.engines.embedded.scheduler import Sequence
from workers.kv.transceiver import Ticket


@dataclass(slots=True, eq=False)
class Call:
    """All that happens to a request arrives in `outbox`: replies, the error that ended it, None as good end.

    `transfer` moves its KV, `ticket` is its offer while there is one; both end with the call.
    """

    request: GenerateRequest
    sequence: Sequence
    deadline: asyncio.TimerHandle
    outbox: asyncio.Queue[KvHandoff | TokenChunk | BatonError | None] = field(default_factory=asyncio.Queue)
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    transfer: asyncio.Task[None] | None = None
    ticket: Ticket | None = None

    async def next_reply(self) -> KvHandoff | TokenChunk | None:
        """Wait for the next reply; None when there is none to come. Raises what ended the request."""
        item = await self.outbox.get()
        if isinstance(item, BatonError):
            raise item
        return item

    async def next_chunk(self) -> TokenChunk | None:
        """`next_reply` where no handoff can come."""
        reply = await self.next_reply()
        assert not isinstance(reply, KvHandoff)
        return reply
