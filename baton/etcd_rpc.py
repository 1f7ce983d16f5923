"""A minimal etcd v3 client: the calls that a registry needs, as coroutines over grpc.aio."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# name:type=number of each field in use, from etcd's rpc.proto and kv.proto; `*` marks a list. Not generated,
# which needs no protoc and cannot clash with another etcd client's descriptors.
_SCHEMA = """
Header                 revision:int64=3
KeyValue               key:bytes=1 value:bytes=5
Event                  type:int32=1 kv:KeyValue=2
RangeRequest           key:bytes=1 range_end:bytes=2 limit:int64=3
RangeResponse          header:Header=1 kvs:KeyValue*=2 more:bool=3
PutRequest             key:bytes=1 value:bytes=2 lease:int64=3
PutResponse            header:Header=1
LeaseGrantRequest      TTL:int64=1
LeaseGrantResponse     ID:int64=2 TTL:int64=3
LeaseRevokeRequest     ID:int64=1
LeaseRevokeResponse    header:Header=1
LeaseKeepAliveRequest  ID:int64=1
LeaseKeepAliveResponse ID:int64=2 TTL:int64=3
AuthenticateRequest    name:string=1 password:string=2
AuthenticateResponse   token:string=2
WatchCreate            key:bytes=1 range_end:bytes=2 start_revision:int64=3
WatchRequest           create_request:WatchCreate=1
WatchResponse          canceled:bool=4 compact_revision:int64=5 cancel_reason:string=6 events:Event*=11
"""
_PACKAGE = "baton.etcd"
_DELETE = 1  # Event.type; 0 is a put

# etcd answers pings more often than every 5 s, or without an open stream, with GOAWAY too_many_pings.
# ping_timeout_ms detects a frozen server; max_pings_without_data 0 lets an idle watch detect it in 6 s
# instead of 54 s (measured).
_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 32 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),
)
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}
_NO_LOGINS = "authentication is not enabled"
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old", "user name is empty")


class EtcdError(Exception):
    """A failed call."""


Change = tuple[bytes, bytes | None]
"""A key and its new value, None if it was deleted or its lease expired."""


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="baton_etcd.proto", package=_PACKAGE, syntax="proto3")
    for line in _SCHEMA.strip().splitlines():
        name, *fields = line.split()
        message = file.message_type.add(name=name)
        for spec in fields:
            label, _, rest = spec.partition(":")
            kind, _, number = rest.partition("=")
            field = message.field.add(name=label, number=int(number))
            repeated, kind = kind.endswith("*"), kind.rstrip("*")
            field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if kind[0].isupper():
                field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = field.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.removeprefix(f"{_PACKAGE}."): each for name, each in found.items()}


_MESSAGES = _message_classes()


def _codecs(name: str) -> tuple[Any, Any]:
    """The request's serializer and the response's deserializer."""
    return _MESSAGES[f"{name}Request"].SerializeToString, _MESSAGES[f"{name}Response"].FromString


def _target(endpoint: str) -> tuple[str, bool]:
    """`http://host:port` -> (gRPC target, TLS?)."""
    url = urlsplit(endpoint.strip())
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    return f"{host}:{url.port or 2379}", url.scheme == "https"


def prefix_end(prefix: bytes) -> bytes:
    """The end of the range of keys that start with `prefix`, which must not end in 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


class EtcdRpc:
    """A client of one etcd cluster; `login` is a user and password. Each call takes `timeout_s` at most and
    raises EtcdError.

    Calls are retried only after an expired token; after a failure the next call uses the next endpoint. An
    instance belongs to one event loop: the first call opens its channels."""

    def __init__(
        self,
        endpoints: str,
        *,
        timeout_s: float,
        login: tuple[str, str] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._targets = deque(map(_target, endpoints.split(",")))  # the first is in use
        self._timeout_s = timeout_s
        self._login = login
        self._credentials = credentials or grpc.ssl_channel_credentials()
        self._closed = False
        self._token: str | None = None
        self._channels: dict[tuple[str, bool], grpc.aio.Channel] = {}

    async def call(self, path: str, **fields: Any) -> Any:
        """etcd's response to one request, such as `KV/Put`. `Lease/LeaseKeepAlive`, a stream in both
        directions, looks the same on the wire with one request and one reply."""
        try:
            return await self._send(path, await self._metadata(), fields)
        except EtcdError as error:
            if self._login is None or not str(error).endswith(_STALE_TOKEN):
                raise
        self._token = None
        return await self._send(path, await self._metadata(), fields)

    async def list_prefix(self, prefix: bytes, limit: int) -> tuple[dict[bytes, bytes], int]:
        """At most `limit` values whose keys start with `prefix`, and their revision."""
        response = await self.call("KV/Range", key=prefix, range_end=prefix_end(prefix), limit=limit)
        return {pair.key: pair.value for pair in response.kvs}, response.header.revision

    async def watch(
        self, prefix: bytes, revision: int, duration_s: float | None
    ) -> AsyncGenerator[list[Change], None]:
        """Yield changes under `prefix` from `revision` on; ends after `duration_s` if given.

        The first, empty list says that the watch is established. Raises EtcdError if the watch breaks or is
        refused, or if the revision is compacted: then list again."""
        create = {"key": prefix, "range_end": prefix_end(prefix), "start_revision": revision}
        # hasleader: a member without a quorum ends the watch instead of going silent.
        metadata = (*await self._metadata(), ("hasleader", "true"))
        channel = self._channel()
        stub = channel.unary_stream("/etcdserverpb.Watch/Watch", *_codecs("Watch"))
        now_s = asyncio.get_running_loop().time()
        limit_s: float | None = now_s + self._timeout_s
        call = stub(_MESSAGES["WatchRequest"](create_request=create), metadata=metadata)
        responses, response = aiter(call), None
        try:
            while True:
                with self._failures(channel):
                    async with asyncio.timeout_at(limit_s):
                        response = await anext(responses, None)
                if response is None:
                    raise EtcdError("etcd ended the watch")
                if response.canceled:
                    reason = response.cancel_reason or f"compacted up to revision {response.compact_revision}"
                    raise EtcdError(f"etcd cancelled the watch: {reason}")
                yield [(e.kv.key, None if e.type == _DELETE else e.kv.value) for e in response.events]
                limit_s = None if duration_s is None else now_s + duration_s
        except TimeoutError:
            if response is None:
                self._leave(channel)
                raise EtcdError("etcd did not answer a watch") from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close every connection; nothing may wait for one any more."""
        self._closed = True
        for channel in self._channels.values():
            await channel.close(None)

    async def _metadata(self) -> tuple[tuple[str, str], ...]:
        """The user's token; logs in if there is none."""
        if self._login is None:
            return ()
        if self._token is None:
            name, password = self._login
            try:
                response = await self._send("Auth/Authenticate", (), {"name": name, "password": password})
            except EtcdError as error:
                if not str(error).endswith(_NO_LOGINS):
                    raise
                return ()
            self._token = str(response.token)
        return (("token", self._token),)

    async def _send(self, path: str, metadata: tuple[tuple[str, str], ...], fields: dict[str, Any]) -> Any:
        name = path.partition("/")[2]
        channel = self._channel()
        stub = channel.unary_unary(f"/etcdserverpb.{path}", *_codecs(name))
        with self._failures(channel):
            return await stub(
                _MESSAGES[f"{name}Request"](**fields), timeout=self._timeout_s, metadata=metadata
            )

    @contextmanager
    def _failures(self, channel: grpc.aio.Channel) -> Iterator[None]:
        """Raise EtcdError for a failure of the wait inside. After a failure the next endpoint is used."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSALS:
                self._leave(channel)
            raise EtcdError(f"{error.code().name} {error.details() or ''}".strip()) from error

    def _channel(self) -> grpc.aio.Channel:
        """The channel to the current endpoint; opened lazily, as it belongs to the running event loop."""
        if self._closed:
            raise EtcdError("this client is closed")
        target, is_tls = place = self._targets[0]
        if place not in self._channels:
            self._channels[place] = (
                grpc.aio.secure_channel(target, self._credentials, _CHANNEL_OPTIONS)
                if is_tls
                else grpc.aio.insecure_channel(target, _CHANNEL_OPTIONS)
            )
        return self._channels[place]

    def _leave(self, channel: grpc.aio.Channel) -> None:
        """Switch to the next endpoint, unless a concurrent call already did."""
        if channel is self._channels.get(self._targets[0]):
            self._targets.rotate(-1)
