"""A receiver of traces over OTLP/HTTP, in a thread."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver:
    """Keeps what it receives. It answers with `status`, and waits before that while `go_on` is cleared."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.go_on = threading.Event()
        self.go_on.set()
        self.num_asked = 0
        self.paths: set[str] = set()
        self.bodies: list[bytes] = []

    @property
    def spans(self) -> list[Span]:
        """All that have come."""
        requests = [ExportTraceServiceRequest.FromString(body) for body in list(self.bodies)]
        scopes = [
            scope for each in requests for resource in each.resource_spans for scope in resource.scope_spans
        ]
        return [span for scope in scopes for span in scope.spans]

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of this trace, the first to begin first."""
        found = [span for span in self.spans if span.trace_id.hex() == trace_id]
        return sorted(found, key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano))


def attributes(span: Span) -> dict[str, Any]:
    """Its attributes as Python values."""
    kinds = {each.key: (each.value, each.value.WhichOneof("value")) for each in span.attributes}
    return {key: getattr(value, kind) for key, (value, kind) in kinds.items() if kind is not None}


def lasted_s(*spans: Span) -> float:
    """Their durations, added up."""
    return sum(span.end_time_unix_nano - span.start_time_unix_nano for span in spans) / 1e9


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a port of its own."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.num_asked += 1
            receiver.paths.add(self.path)
            receiver.go_on.wait()
            if receiver.status == 200:
                is_packed = self.headers.get("content-encoding") == "gzip"
                receiver.bodies.append(gzip.decompress(body) if is_packed else body)
            self.send_response(receiver.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield receiver
        finally:
            receiver.go_on.set()
            server.shutdown()
