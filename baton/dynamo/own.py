"""What processes of Baton's send each other over Dynamo's request plane: their own messages, in msgpack."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import msgspec

from baton.errors import ErrorInfo, InvalidRequest, from_wire
from baton.frames import MAX_FRAME_BYTES
from baton.messages import UNDECODABLE, Reply, Request

_ENCODER = msgspec.msgpack.Encoder()
_REQUEST = msgspec.msgpack.Decoder(Request)
_ITEM = msgspec.msgpack.Decoder(list[Reply] | ErrorInfo)


def own_body(message: Request | Sequence[Reply] | ErrorInfo) -> bytes:
    """A request, or an item of an answer: replies, or the error that ends it. Raises InvalidRequest."""
    return _limited(_ENCODER.encode(message))


def own_request(body: bytes) -> Request:
    """What a process of Baton's asks. Raises InvalidRequest."""
    try:
        request: Request = _REQUEST.decode(_limited(body))
    except UNDECODABLE as error:
        raise InvalidRequest(f"this version of Baton cannot decode the request: {error}") from error
    return request


async def own_replies(items: AsyncIterator[Any]) -> AsyncGenerator[Reply, None]:
    """The replies of an answer. Raises the error that ends it."""
    async for item in items:
        content = _ITEM.decode(msgspec.convert(item, bytes))
        if isinstance(content, ErrorInfo):
            raise from_wire(content)
        for reply in content:
            yield reply


def _limited(body: bytes) -> bytes:
    if len(body) > MAX_FRAME_BYTES:
        raise InvalidRequest(
            f"a message of {len(body)} bytes exceeds this request plane's limit of {MAX_FRAME_BYTES}"
        )
    return body
