"""Answers to HTTP/1.0 requests: they end with the connection instead of in chunks."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from frontend.http.exchange import Message, Receive, Scope, Send


def unchunked(cycle: RequestResponseCycle, app: Any) -> Any:  # their types are uvicorn's
    """The app, whose answers `cycle` writes without chunks."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        cycle.chunked_encoding = False

        async def whole(message: Message) -> None:
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, whole)

    return run
