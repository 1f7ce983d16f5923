"""Asks etcd and NATS for access, latency, version and time."""

import email.utils
import http.client
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec
from msgspec.structs import replace

from baton.flags import without_secrets
from baton.nats_login import nats_options, proof
from baton.tls import client_context
from operations.doctor.facts import Service

_TIMEOUT_S = 3.0
_WHOLE_TIMEOUT_S = 10.0
"""Limit for all probes: a name server may hang, a peer may send a byte a second."""
_KNOCKS = 3
_MAX_BYTES = 1 << 16

Probe = Callable[[str], Service]


class _Info(msgspec.Struct):
    max_payload: int | None = None
    version: str = ""
    tls_required: bool = False
    nonce: str = ""


def probe_services(
    asked: Sequence[tuple[Probe, str]], timeout_s: float = _WHOLE_TIMEOUT_S
) -> tuple[Service, ...]:
    """Run all probes in parallel; a server that does not answer in time gets a `problem`."""
    answers: dict[str, Service] = {}

    def ask(probe: Probe, url: str) -> None:
        answers[url] = probe(url)

    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in asked]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    late = f"no answer in {timeout_s:.0f} s"
    return tuple(
        answers.get(url)
        or Service(name="NATS" if probe is probe_nats else "etcd", url=without_secrets(url), problem=late)
        for probe, url in asked
    )


def probe_etcd(url: str) -> Service:
    """GET /health on etcd's client port; the latency is the best of three."""
    if not re.match(r"https?://.", url):
        return Service(name="etcd", url=url, problem="not http://host:port or https://host:port")
    latencies_s, date, version = [], None, ""
    try:
        ask = _Etcd(url)
        for _ in range(_KNOCKS):
            begin_s = time.perf_counter()
            _, date = ask("/health")
            latencies_s.append(time.perf_counter() - begin_s)
        version = str(ask("/version")[0].get("etcdserver", ""))
    except http.client.HTTPException:
        return Service(name="etcd", url=url, problem="another program listens there: it does not speak HTTP")
    except (OSError, ValueError, msgspec.DecodeError) as error:
        return Service(name="etcd", url=url, problem=_why(error))
    return Service(
        name="etcd",
        url=url,
        latency_s=min(latencies_s),
        clock_ahead_s=_clock_ahead_s(date),
        version=_version(version),
    )


class _Etcd:
    """etcd's pages for operators, reached as Baton reaches its gRPC API: same certificates, no HTTP proxy."""

    def __init__(self, url: str) -> None:
        names = ("ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY")
        context = client_context(*(Path(path) if (path := os.environ.get(name)) else None for name in names))
        self._url = url
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def __call__(self, path: str) -> tuple[dict[str, Any], str | None]:
        """Return (JSON object, Date header). Raises OSError, ValueError, HTTPException."""
        with self._opener.open(self._url + path, timeout=_TIMEOUT_S) as answer:
            page = msgspec.json.decode(answer.read(_MAX_BYTES), type=dict[str, Any])
            return page, answer.headers.get("Date")


def probe_nats(url: str) -> Service:
    """Read INFO, send CONNECT, then PING for a PONG; the latency is the best of three."""
    try:
        parts = urlsplit(url)
        if not parts.hostname:
            return Service(name="NATS", url=without_secrets(url), problem="not nats://host:port")
        with socket.create_connection((parts.hostname, parts.port or 4222), _TIMEOUT_S) as connection:
            return _greet(url, parts, connection)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        return Service(name="NATS", url=without_secrets(url), problem=_why(error))


def _greet(url: str, parts: SplitResult, connection: socket.socket) -> Service:
    stream = connection.makefile("rwb")
    greeting = stream.readline(_MAX_BYTES)
    service = Service(name="NATS", url=without_secrets(url))
    if not greeting.startswith(b"INFO "):
        return replace(service, problem="another program listens there: it sends no INFO")
    info = msgspec.json.decode(greeting[5:], type=_Info)
    service = replace(service, max_payload_bytes=info.max_payload, version=_version(info.version))
    if info.tls_required:
        return service  # only the processes' NATS client has the certificates
    stream.write(b"CONNECT " + json.dumps({"verbose": False} | _login(parts, info.nonce)).encode() + b"\r\n")
    latencies_s = []
    for _ in range(_KNOCKS):
        begin_s = time.perf_counter()
        stream.write(b"PING\r\n")
        stream.flush()
        answer = stream.readline(_MAX_BYTES)
        if answer.startswith(b"-ERR"):
            return replace(service, refusal=answer[4:].decode(errors="replace").strip(" '\r\n"))
        if not answer.startswith(b"PONG"):
            return replace(service, problem="no PONG to a PING")
        latencies_s.append(time.perf_counter() - begin_s)
    return replace(service, latency_s=min(latencies_s))


def _login(parts: SplitResult, nonce: str) -> dict[str, str]:
    """Those of the environment, else as nats-py reads the URL: a user without password is a token."""
    names = {"user": "user", "password": "pass", "token": "auth_token"}
    login = {names[name]: value for name, value in nats_options().items() if name in names}
    if login := login | (proof(nonce) if nonce else {}):
        return login
    if parts.password is not None:
        return {"user": unquote(parts.username or ""), "pass": unquote(parts.password)}
    return {"auth_token": unquote(parts.username)} if parts.username else {}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,9}", text)[:3])


def _clock_ahead_s(date: str | None) -> float | None:
    try:
        return time.time() - email.utils.parsedate_to_datetime(date).timestamp() if date else None
    except (ValueError, TypeError, OverflowError):
        return None


def _why(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"answers HTTP {error.code}"
    if isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
