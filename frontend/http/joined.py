"""A connection's transport that sends the head of a response together with the first part of its body."""

import asyncio


class JoinedHead(asyncio.Transport):
    """uvicorn writes a response's head and body one after the other, and uvloop sends each at once: two
    system calls and two packets for a short answer. Here the head waits for the body, within one iteration
    of the event loop.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See asyncio.Transport."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif data[:9] == b"HTTP/1.1 ":
            self._head = bytes(data)
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def write_eof(self) -> None:
        """See asyncio.Transport."""
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        """See asyncio.Transport."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """See asyncio.Transport."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """See asyncio.Transport."""
        return self._transport.is_closing()

    def can_write_eof(self) -> bool:
        """See asyncio.Transport."""
        return self._transport.can_write_eof()

    def get_write_buffer_size(self) -> int:
        """See asyncio.Transport."""
        return self._transport.get_write_buffer_size()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)
