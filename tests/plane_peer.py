"""A process that a test kills or freezes: `python -m tests.plane_peer KIND NATS_URL LIVENESS_S [ADDRESS]`.

Without an address it is a worker and prints its address; with one it calls that worker and prints replies."""

import asyncio
import sys
from collections.abc import AsyncGenerator

import uvloop

from baton.messages import Reply, Request, TokenChunk
from baton.transport import Transport
from tests.planes import Plane, a_request


async def answer(_: Request) -> AsyncGenerator[Reply, None]:
    yield TokenChunk(token_ids=(1,))
    await asyncio.Event().wait()


async def live(transport: Transport, address: str | None) -> None:
    if address is None:
        async with transport.serve("peer", answer) as mine:
            sys.stdout.write(f"{mine}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()
    else:
        async for reply in transport.call(address, a_request()):
            sys.stdout.write(f"{reply}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    kind, nats_url, liveness_s, *rest = sys.argv[1:]
    uvloop.run(live(Plane(kind, nats_url).transport(float(liveness_s)), rest[0] if rest else None))
