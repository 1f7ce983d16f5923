"""Discovery over etcd: one key with a lease per worker, one watch per watcher."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import grpc
import msgspec

from baton.discovery import MAX_WORKERS, decode_worker, kept
from baton.etcd_rpc import EtcdError, EtcdRpc
from baton.messages import WorkerInfo

log = logging.getLogger(__name__)

PREFIX = b"v1/instances/"
_RETRY_S = 0.5


def instance_key(info: WorkerInfo) -> bytes:
    """`dyn://a.b.c` -> `v1/instances/a/b/c/{worker_id}`, as Dynamo does."""
    endpoint = info.endpoint.removeprefix("dyn://").replace(".", "/")
    return PREFIX + f"{endpoint}/{quote(info.worker_id, safe=':')}".encode()


class EtcdDiscovery:
    """`Discovery` over etcd. `endpoints`: comma-separated members of one cluster, http:// or https://.
    `tls_files`: the authority, this process's certificate and its key.

    While etcd is unreachable, watchers keep their last snapshot and registrations wait; this is logged once.
    After an outage etcd may lack workers (frozen past their leases, or restored without its data) that are
    about to register again, so missing workers stay visible for one lease time."""

    def __init__(
        self,
        endpoints: str,
        *,
        lease_ttl_s: float = 10.0,
        login: tuple[str, str] | None = None,
        tls_files: tuple[Path | None, Path | None, Path | None] = (None, None, None),
    ) -> None:
        ca, cert, key = (path.read_bytes() if path else None for path in tls_files)
        self._ttl_s = lease_ttl_s
        self._doubt_s = max(lease_ttl_s, 5.0)  # reconnecting and retrying a registration takes up to 4 s
        self._rpc = EtcdRpc(
            endpoints,
            timeout_s=min(3.0, max(1.0, lease_ttl_s / 3)),
            login=login,
            credentials=grpc.ssl_channel_credentials(ca, key, cert) if ca or cert else None,
        )
        self.problem = ""

    @asynccontextmanager
    async def register(self, info: WorkerInfo) -> AsyncGenerator[None, None]:
        """See `Discovery`. Waits while etcd is unreachable or refuses the user."""
        call, key, value, lease = self._rpc.call, instance_key(info), msgspec.json.encode(info), 0

        async def hold() -> bool:
            """Keep the lease alive; write the key if it or the lease was lost."""
            nonlocal lease
            try:
                # A lease that expired, with all of its keys, has TTL 0, which is no error.
                if lease and (await call("Lease/LeaseKeepAlive", ID=lease)).TTL <= 0:
                    lease = 0
                if is_new := not lease:
                    lease = (await call("Lease/LeaseGrant", TTL=math.ceil(self._ttl_s))).ID
                if is_new or not (await call("KV/Range", key=key)).kvs:
                    await call("KV/Put", key=key, value=value, lease=lease)
                    log.info("registration=written key=%s", key.decode())
            except EtcdError as error:
                self._note(error)
                return False
            self._note(None)
            return True

        try:
            async with kept(hold, every_s=self._ttl_s / 3, retry_s=_RETRY_S):
                yield
        finally:
            if lease:
                await self._withdraw(key, lease)

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        """See `Discovery`. Yields nothing until etcd has answered; never raises."""
        fleet: dict[bytes, WorkerInfo] = {}
        shown: tuple[WorkerInfo, ...] | None = None
        doubtful = False
        while True:
            try:
                async with aclosing(self._follow(fleet, doubtful=doubtful)) as snapshots:
                    async for snapshot in snapshots:
                        if snapshot != shown:
                            shown = snapshot
                            yield snapshot
                doubtful = False
            except EtcdError as error:
                doubtful = True
                self._note(error)
                await asyncio.sleep(_RETRY_S)  # etcd is unreachable: retry after a pause

    async def close(self) -> None:
        await self._rpc.close()

    async def _follow(
        self, fleet: dict[bytes, WorkerInfo], *, doubtful: bool
    ) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        """List, then apply changes, yielding the fleet after each. If `doubtful`, nothing is removed and it
        ends after `_doubt_s`."""
        values, revision = await self._rpc.list_prefix(PREFIX, MAX_WORKERS)
        self._note(None)
        if not doubtful:
            fleet.clear()
        for key, listed in values.items():
            _apply(fleet, key, listed)
        duration_s = self._doubt_s if doubtful else None
        async with aclosing(self._rpc.watch(PREFIX, revision + 1, duration_s)) as batches:
            async for changes in batches:
                for key, value in changes:
                    if value is not None or not doubtful:
                        _apply(fleet, key, value)
                yield tuple(sorted(fleet.values(), key=lambda info: info.worker_id))

    async def _withdraw(self, key: bytes, lease: int) -> None:
        """Delete the key, unless it was rewritten with another lease; if etcd is unreachable, the lease
        expires."""
        try:
            await self._rpc.call("Lease/LeaseRevoke", ID=lease)
        except EtcdError as error:
            log.warning("registration=not_withdrawn key=%s error=%s", key.decode(), error)

    def _note(self, error: EtcdError | None) -> None:
        """Log once when etcd becomes unreachable and once when it is back."""
        if error is not None and not self.problem:
            log.warning("registry=unreachable kind=etcd error=%s", error)
        elif error is None and self.problem:
            log.info("registry=reachable kind=etcd")
        self.problem = "" if error is None else str(error)


def _apply(fleet: dict[bytes, WorkerInfo], key: bytes, value: bytes | None) -> None:
    info = None if value is None else decode_worker(value, key.decode(errors="replace"))
    if info is None:
        fleet.pop(key, None)
    else:
        fleet[key] = info
