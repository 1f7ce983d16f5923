"""The way to a running frontend, for status, top, why and bench: the flags that name it, and requests."""

import contextlib
import dataclasses
import ssl
import time
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, RemoteDisconnected
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from baton import tls
from baton.connect import HTTP_PORT
from baton.flags import flag, without_secrets
from operations.errors import CommandError, FrontendError

T = TypeVar("T")
_TIMEOUT_S = 2.0
_MAX_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontendFlags:
    """Flags of the tools that need a running frontend."""

    url: str = flag("http://127.0.0.1:8000", "the frontend, or its port here", env=HTTP_PORT, metavar="URL")
    api_key: str = flag("", "for a frontend with --api-keys-file", env="BATON_API_KEY", metavar="KEY")
    insecure: bool = flag(False, "do not check the frontend's certificate")
    tls_cert_file: Path | None = flag(None, "certificate to show, if it asks for one (PEM)", metavar="PATH")
    tls_key_file: Path | None = flag(None, "key of that certificate", metavar="PATH")


class _Error(msgspec.Struct):
    message: str
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class Client:
    """Sends requests to the frontend that the flags name, without proxies. Raises CommandError."""

    def __init__(self, flags: FrontendFlags) -> None:
        self.url = _url(flags.url)
        parts = urlsplit(self.url)
        self._connection = partial(HTTPConnection, parts.hostname or "", parts.port)
        if parts.scheme == "https":
            context = _context(flags)
            self._connection = partial(HTTPSConnection, parts.hostname or "", parts.port, context=context)
        self._path = parts.path
        if not (flags.api_key.isascii() and flags.api_key.isprintable()):
            raise CommandError("the API key must be printable ASCII")
        key = {"Authorization": f"Bearer {flags.api_key}"} if flags.api_key else {}
        self._headers = {"Connection": "close", "Content-Type": "application/json", **key}

    @contextlib.contextmanager
    def send(
        self, path: str, data: bytes | None = None, timeout_s: float = _TIMEOUT_S, *, also: int = 200
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Status (200 or `also`) and parts of the answer to a GET, or to a POST of `data`; all of them come
        within `timeout_s`. Raises FrontendError, also for what goes wrong while they are read."""
        method, end_s = "GET" if data is None else "POST", time.monotonic() + timeout_s
        try:
            with contextlib.closing(self._connection(timeout=timeout_s)) as connection:
                connection.request(method, self._path + path, data, self._headers)
                answer = connection.getresponse()
                if answer.status not in (200, also):
                    raise self.error(_whole(_parts(answer, end_s)), answer.status)
                yield answer.status, _parts(answer, end_s)
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            raise FrontendError(f"no frontend answers at {self.url}: {_reason(error)}") from error

    def get(self, path: str, kind: type[T], timeout_s: float = _TIMEOUT_S) -> T:
        """The JSON there, also that of a frontend that is not ready (503). Raises FrontendError."""
        with self.send(path, timeout_s=timeout_s, also=503) as (status, parts):
            body = _whole(parts)
            try:
                return msgspec.json.decode(body, type=kind)
            except msgspec.DecodeError:
                if status == 200:
                    raise
                raise self.error(body, status) from None

    def error(self, body: bytes, status: int) -> FrontendError:
        """The error in an answer, which need not be a frontend's."""
        try:
            error = msgspec.json.decode(body, type=_ErrorBody).error
        except (msgspec.DecodeError, RecursionError):
            return FrontendError(f"no frontend answers at {self.url}: HTTP status {status}", status=status)
        code = "" if error.code is None else f"{error.code}"[:80]
        text = error.message + " Export it as BATON_API_KEY." * (status == 401)
        return FrontendError(text, status=status, code=code)


def _parts(answer: HTTPResponse, end_s: float) -> Iterator[bytes]:
    while part := answer.read1(1 << 16):
        if time.monotonic() > end_s:
            raise TimeoutError
        yield part


def _whole(parts: Iterator[bytes]) -> bytes:
    found = bytearray()
    for part in parts:
        found += part
        if len(found) > _MAX_BYTES:
            raise ValueError("its answer is too large")
    return bytes(found)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, ssl.SSLError):
        return tls.peers_fault(error)
    if isinstance(error, ConnectionRefusedError):
        return "Connection refused; HTTP_PORT or --url names another port"
    if isinstance(error, RemoteDisconnected):
        return "it closed the connection; if it serves HTTPS, give --url https://..."
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"what answers is no frontend ({error})"


def _url(text: str) -> str:
    """The frontend's, without a slash at its end. Raises CommandError."""
    url = f"http://127.0.0.1:{text}" if text.isdecimal() else text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or not (url.isascii() and url.isprintable()) or set(url) & set("@?# "):
        allowed = "the frontend must be a URL such as http://127.0.0.1:8000, or a port"
        raise CommandError(f"{without_secrets(text)}: {allowed}")
    return url.rstrip("/").removesuffix("/v1")


def _context(flags: FrontendFlags) -> ssl.SSLContext:
    try:
        context = tls.client_context(None, flags.tls_cert_file, flags.tls_key_file)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if flags.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
