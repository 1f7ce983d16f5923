"""Server-sent events."""

import msgspec

KEEP_ALIVE = b": keep-alive\n\n"
CONTENT_TYPE = b"text/event-stream; charset=utf-8"
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


def event(body: msgspec.Struct) -> bytes:
    """One unnamed event. Encoded JSON has no line breaks, so the data is one line."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
