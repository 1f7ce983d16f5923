"""Clients that offer HTTP/2 with a POST, on real sockets: their bodies are bodies, however late they come."""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from frontend.http.body import Bodies
from frontend.http.exchange import Exchange, Receive, Scope, Send
from frontend.http.server import HttpServer
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.loops("uvloop")
HEAD = (
    b"POST /first HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\ncontent-length: %d\r\n\r\n"
)
BODY = b"POST /smuggled HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
JAVA = """
import java.net.URI;
import java.net.http.*;

class Post {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (String body : new String[] {"first", "x".repeat(100000), "third"}) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(args[0] + "/java"))
                .POST(HttpRequest.BodyPublishers.ofString(body)).build();
            HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.version() + " " + answer.body());
        }
    }
}
"""


class App:
    """An app that returns the length of each body, and keeps its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests.append((scope["method"], scope["path"]))
        exchange = Exchange(scope, receive, send)
        async with Bodies().received(exchange) as body:
            self.bodies.append(body)
        length = b"%d" % len(self.bodies[-1])
        await exchange.start(200, b"text/plain", [(b"content-length", b"%d" % len(length))])
        await exchange.end(length)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[App, int]]:
    app = App()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = HttpServer(app, 1.0)
    server.start(listener)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield app, port
    finally:
        await server.drain()


@pytest.mark.parametrize("num_bytes", [1, 7, 1000, None])
@pytest.mark.parametrize(
    ("head", "body", "length"),
    [
        (HEAD % len(BODY), BODY, len(BODY)),
        (HEAD.replace(b"content-length: %d", b"transfer-encoding: chunked"), b"3\r\nGET\r\n0\r\n\r\n", 3),
        (HEAD.replace(b"content-length: %d\r\n", b"").replace(b"POST", b"GET"), b"", 0),
    ],
    ids=["length", "chunks", "no body"],
)
async def test_an_offer_changes_nothing_wherever_the_data_is_cut(
    head: bytes, body: bytes, length: int, num_bytes: int | None
) -> None:
    """None: the body comes when the app has got the head."""
    async with serving() as (app, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data, size = head + body, num_bytes or len(head)
        for i in range(0, len(data), size):
            writer.write(data[i : i + size])  # each piece is a write
            await (asyncio.sleep(0) if num_bytes else until(lambda: app.requests))  # the server's turn
        answer = await reader.read()
        assert b"\r\nconnection: close\r\n" in answer
        assert answer.endswith(b"\r\n\r\n%d" % length)
        assert [path for _, path in app.requests] == ["/first"]
        assert app.bodies == [body if b"chunked" not in head else b"GET"]
        writer.close()


async def test_requests_behind_an_offer_are_not_read() -> None:
    async with serving() as (app, port):
        failures: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(800 * b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
        assert (await reader.read()).endswith(b"\r\n\r\n0")
        assert (len(app.requests), failures) == (1, [])
        writer.close()


@pytest.mark.skipif(shutil.which("java") is None, reason="needs java")
async def test_javas_client_is_served_with_its_defaults(tmp_path: Path) -> None:
    source = tmp_path / "Post.java"
    source.write_text(JAVA)
    async with serving() as (app, port):
        process = await asyncio.create_subprocess_exec(
            "java", str(source), f"http://127.0.0.1:{port}", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await process.communicate()
        assert output.decode().splitlines() == [f"200 HTTP_1_1 {num}" for num in (5, 100_000, 5)]
        assert app.requests == [("POST", "/java")] * 3
