"""Shared parts of the discovery tests: a worker to register, and an observer of snapshots."""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager

import httpx

from baton.discovery import Discovery
from baton.messages import KvLayout, Role, WorkerInfo
from tests.waiting import PATIENCE_S

Snapshot = tuple[WorkerInfo, ...]


def worker(worker_id: str, *, incarnation: str = "first", namespace: str = "dynamo") -> WorkerInfo:
    """A worker with every field set."""
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=incarnation,
        role=Role.PREFILL,
        endpoint=f"dyn://{namespace}.prefill.generate",
        model="openai/gpt-oss-120b",
        model_path="/models/gpt-oss-120b",
        address="tcp://127.0.0.1:7001",
        context_length=131_072,
        engine="embedded",
        engine_version="5.23",
        kv_layout=KvLayout(dtype="bf16", tokens_per_block=64, num_layers=36, num_kv_heads=8, head_dim=64),
        kv_transfer="ucx (tcp)",
    )


class Onlooker:
    """Follows one watch. `lost` are workers that disappeared."""

    def __init__(self, discovery: Discovery) -> None:
        self.now: Snapshot | None = None
        self.num_snapshots = 0
        self.lost: set[str] = set()
        self._discovery = discovery
        self._changed = asyncio.Condition()

    async def follow(self) -> None:
        async with aclosing(self._discovery.watch()) as snapshots:
            async for snapshot in snapshots:
                async with self._changed:
                    self.lost |= {w.worker_id for w in self.now or ()} - {w.worker_id for w in snapshot}
                    self.now = snapshot
                    self.num_snapshots += 1
                    self._changed.notify_all()

    async def until(self, condition: Callable[[Snapshot], bool], timeout_s: float = PATIENCE_S) -> float:
        """Wait until a snapshot satisfies the condition; returns the seconds it took."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.now is not None and condition(self.now))
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s} s; shown: {self.now}") from None
        return time.monotonic() - start

    async def until_shown(self, *worker_ids: str, timeout_s: float = PATIENCE_S) -> float:
        """Wait until exactly these are shown."""
        return await self.until(lambda s: [w.worker_id for w in s] == sorted(worker_ids), timeout_s)


@asynccontextmanager
async def onlooker(discovery: Discovery) -> AsyncGenerator[Onlooker, None]:
    """An observer that has seen its first snapshot."""
    looker = Onlooker(discovery)
    task = asyncio.create_task(looker.follow())
    try:
        await looker.until(lambda _: True)
        yield looker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def etcd_api(url: str, path: str, token: str = "", **fields: bytes | str) -> dict[str, str]:
    """Call etcd's JSON API, as an operator's tool would; bytes are base64."""
    body = {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in fields.items()}
    reply = httpx.post(
        f"{url}/v3/{path}", json=body, headers={"Authorization": token} if token else {}, timeout=PATIENCE_S
    )
    reply.raise_for_status()
    found: dict[str, str] = reply.json()
    return found
