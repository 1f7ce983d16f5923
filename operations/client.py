"""The way to a running frontend, for status, top, why and bench: the flags that name it, and requests."""

import asyncio
import contextlib
import dataclasses
import json
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from baton import tls
from baton.connect import HTTP_PORT
from baton.flags import Parsed, flag, without_secrets

T = TypeVar("T")
S = TypeVar("S", bound="FrontendFlags")
TIMEOUT_S = 2.0
_MAX_BYTES = 16 << 20
_MAX_LINE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontendFlags:
    """Flags of the tools that need a running frontend."""

    url: str = flag(
        "http://127.0.0.1:8000", "the frontend; or its port on this machine", env=HTTP_PORT, metavar="URL"
    )
    api_key: str | None = flag(
        None, "for a frontend with --api-keys-file", env="BATON_API_KEY", metavar="KEY"
    )
    insecure: bool = flag(False, "do not check the frontend's certificate")
    tls_cert_file: Path | None = flag(None, "certificate to show, if it asks for one (PEM)", metavar="PATH")
    tls_key_file: Path | None = flag(None, "key of that certificate", metavar="PATH")


class FrontendError(Exception):
    """A frontend does not answer, or answers with an error (`status`); the message is a sentence."""

    def __init__(self, text: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.code = code


@dataclasses.dataclass(frozen=True)
class Answer:
    """A response whose head has arrived."""

    status: int
    headers: dict[str, str]
    _reader: asyncio.StreamReader

    async def parts(self) -> AsyncIterator[bytes]:
        """The body, as it arrives. Raises ValueError if it is not HTTP, EOFError if it ends too early."""
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            async for part in self._take(int(self.headers.get("content-length", -1))):
                yield part
            return
        while num_bytes := int((await self._reader.readline()).partition(b";")[0], 16):
            async for part in self._take(num_bytes):
                yield part
            await self._reader.readline()

    async def _take(self, num_bytes: int) -> AsyncIterator[bytes]:
        """So many bytes; negative: all until the connection ends."""
        left = num_bytes
        while left and (part := await self._reader.read(min(left, 1 << 16) if left > 0 else 1 << 16)):
            left -= len(part) if left > 0 else 0
            yield part
        if left > 0:
            raise EOFError

    async def body(self) -> bytes:
        """The whole body, of at most 16 MiB."""
        found = bytearray()
        async for part in self.parts():
            found += part
            if len(found) > _MAX_BYTES:
                raise ValueError("the answer is larger than 16 MiB")
        return bytes(found)


class Client:
    """Sends requests to the frontend that the flags name. Raises FrontendError if they are wrong."""

    def __init__(self, parsed: Parsed[S]) -> None:
        settings, source = parsed.settings, parsed.sources["url"]
        is_typed = source in ("flag", "default")
        self.url = _url(settings.url, "--url " if is_typed else f"{source}=", is_port=not is_typed)
        parts = urlsplit(self.url)
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = _context(settings) if parts.scheme == "https" else None
        key = settings.api_key or ""
        if not (key.isascii() and key.isprintable()):
            raise FrontendError("the API key must be printable ASCII")
        self._head = f"host: {parts.netloc.rpartition('@')[2]}\r\nconnection: close\r\naccept: */*\r\n" + (
            f"authorization: Bearer {key}\r\n" if key else ""
        )
        self._prefix = parts.path

    def get(self, path: str, kind: type[T], timeout_s: float = TIMEOUT_S) -> T:
        """The JSON there, also of a frontend that is not ready (503). Raises FrontendError."""
        try:
            return asyncio.run(asyncio.wait_for(self._get(path, kind), timeout_s))
        except FrontendError:
            raise
        except (OSError, EOFError, ValueError) as error:
            raise FrontendError(f"no frontend answers at {self.url}: {reason(error)}") from error

    async def _get(self, path: str, kind: type[T]) -> T:
        async with self.send(path) as answer:
            body = await answer.body()
        try:
            if answer.status in (200, 503):
                return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            if answer.status == 200:
                raise
        raise error_of(self.url, answer.status, body)

    @contextlib.asynccontextmanager
    async def send(self, path: str, data: bytes = b"") -> AsyncIterator[Answer]:
        """GET, or POST of JSON `data`, on a connection of its own. Raises OSError, EOFError or ValueError."""
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls, limit=_MAX_LINE_BYTES
        )
        try:
            kind = f"content-type: application/json\r\ncontent-length: {len(data)}\r\n" if data else ""
            line = f"{'POST' if data else 'GET'} {self._prefix}{path} HTTP/1.1\r\n"
            writer.write(f"{line}{self._head}{kind}\r\n".encode() + data)
            yield await _answer(reader)
        finally:
            writer.transport.abort()


async def _answer(reader: asyncio.StreamReader) -> Answer:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        is_silent = isinstance(error, asyncio.IncompleteReadError) and not error.partial
        raise ValueError("the connection was closed" if is_silent else "it does not speak HTTP") from None
    version, _, status = head[0].partition(" ")
    if not version.startswith("HTTP/1.") or not status[:3].isdecimal():
        raise ValueError("it does not speak HTTP")
    pairs = (line.partition(":") for line in head[1:])
    return Answer(int(status[:3]), {name.lower(): value.strip() for name, _, value in pairs}, reader)


def error_of(url: str, status: int, body: bytes) -> FrontendError:
    """The error in an answer, which need not be a frontend's."""
    try:
        error = json.loads(body)["error"]
        return FrontendError(f"{error['message']}", status=status, code=f"{error.get('code') or ''}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return FrontendError(f"no frontend answers at {url}: HTTP status {status}", status=status)


def reason(error: Exception) -> str:
    """Why there was no answer."""
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, ssl.SSLError):
        return tls.peers_fault(error)
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    if isinstance(error, EOFError):
        return "the connection was closed"
    if isinstance(error, msgspec.DecodeError):
        return f"what answers is no frontend ({error})"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _url(text: str, name: str, *, is_port: bool) -> str:
    """The frontend's, without a slash at its end; `is_port`: nothing else is allowed."""
    is_port |= text.isdecimal()
    url = f"http://127.0.0.1:{text}" if is_port else text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not (is_valid and url.isascii() and url.isprintable() and " " not in url):
        text = without_secrets(text)
        raise FrontendError(f"{name}{text}: must be a URL such as http://127.0.0.1:8000, or a port")
    return url.rstrip("/").removesuffix("/v1")


def _context(settings: FrontendFlags) -> ssl.SSLContext:
    try:
        context = tls.client_context(None, settings.tls_cert_file, settings.tls_key_file)
    except ValueError as error:
        raise FrontendError(str(error)) from error
    if settings.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
