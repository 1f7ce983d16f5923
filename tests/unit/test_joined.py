"""A response's head goes out with the first part of its body, or soon after."""

import asyncio
from collections.abc import Callable, Iterable

import pytest

from frontend.http.server import JoinedHead

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"


class Sent(asyncio.Transport):
    """What reaches the network, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []
        self.closes = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.parts.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        self.closes = True

    def is_closing(self) -> bool:
        return self.closes


def sent(*uses: Callable[[JoinedHead], object]) -> tuple[list[bytes], list[bytes]]:
    """What was sent at once, and after a turn of the event loop."""

    async def main() -> tuple[list[bytes], list[bytes]]:
        below = Sent()
        joined = JoinedHead(below)
        for use in uses:
            use(joined)
        at_once = [*below.parts]
        await asyncio.sleep(0)
        return at_once, below.parts

    return asyncio.run(main())


def writing(data: bytes) -> Callable[[JoinedHead], object]:
    return lambda joined: joined.write(data)


def test_the_head_goes_with_the_body() -> None:
    whole = [HEAD + b"body"]
    assert sent(writing(HEAD), writing(b"body")) == (whole, whole)
    several = [HEAD + b"bo", b"dy", HEAD + b"next"]
    assert sent(*map(writing, (HEAD, b"bo", b"dy", HEAD, b"next"))) == (several, several)


@pytest.mark.parametrize("head", [HEAD, b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_a_head_without_a_body_is_not_kept(head: bytes) -> None:
    assert sent(writing(head)) == ([], [head])


def test_an_end_sends_the_head_first() -> None:
    assert sent(writing(HEAD), JoinedHead.close) == ([HEAD], [HEAD])
