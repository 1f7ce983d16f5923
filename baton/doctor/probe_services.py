"""Knocks at etcd and NATS: do they answer, how fast, what time is it there?"""

import email.utils
import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from baton.doctor.facts import Service

_TIMEOUT_S = 3.0
_KNOCKS = 3
_MAX_LINE_BYTES = 1 << 16


def probe_etcd(url: str) -> Service:
    """GET /health, which etcd answers on its client port; the best of three is the latency."""
    if urlsplit(url).scheme not in ("http", "https"):
        return Service(name="etcd", url=url, problem="not http://host:port or https://host:port")
    latencies_s, clock_ahead_s = [], None
    for _ in range(_KNOCKS):
        begin_s = time.perf_counter()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=_TIMEOUT_S) as answer:  # noqa: S310  checked above
                answer.read(_MAX_LINE_BYTES)
                date = answer.headers.get("Date")
        except http.client.HTTPException:
            return Service(name="etcd", url=url, problem="something else listens there: it speaks no HTTP")
        except (OSError, ValueError) as error:
            return Service(name="etcd", url=url, problem=_why(error))
        latencies_s.append(time.perf_counter() - begin_s)
        if date:
            clock_ahead_s = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
    return Service(name="etcd", url=url, latency_s=min(latencies_s), clock_ahead_s=clock_ahead_s)


def probe_nats(url: str) -> Service:
    """Reads the server's INFO line, then PING and PONG; the best of three is the latency."""
    parts = urlsplit(url)
    try:
        address = (parts.hostname or "", parts.port or 4222)
        with socket.create_connection(address, timeout=_TIMEOUT_S) as connection:
            stream = connection.makefile("rwb")
            greeting = stream.readline(_MAX_LINE_BYTES)
            if not greeting.startswith(b"INFO "):
                return Service(name="NATS", url=url, problem="something else listens there: it sends no INFO")
            info = json.loads(greeting[5:])
            payload_bytes = int(info.get("max_payload", 0)) or None
            if info.get("auth_required") or info.get("tls_required"):
                # Answering PING needs the credentials, which the processes bring themselves.
                return Service(name="NATS", url=url, max_payload_bytes=payload_bytes)
            stream.write(b'CONNECT {"verbose":false}\r\n')
            latencies_s = []
            for _ in range(_KNOCKS):
                begin_s = time.perf_counter()
                stream.write(b"PING\r\n")
                stream.flush()
                if not stream.readline(_MAX_LINE_BYTES).startswith(b"PONG"):
                    return Service(name="NATS", url=url, problem="no PONG to a PING")
                latencies_s.append(time.perf_counter() - begin_s)
    except (OSError, ValueError) as error:
        return Service(name="NATS", url=url, problem=_why(error))
    return Service(name="NATS", url=url, latency_s=min(latencies_s), max_payload_bytes=payload_bytes)


def _why(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"answers HTTP {error.code}"
    if isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
