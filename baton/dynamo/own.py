"""What processes of Baton's send each other over Dynamo's request plane: their own messages, in msgpack."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from baton.dynamo.asks import Ask
from baton.errors import BatonError, InvalidRequest, from_wire
from baton.frames import MAX_FRAME_BYTES, Fail, Next
from baton.messages import UNDECODABLE, GenerateRequest, Reply, Request

_ENCODER = msgspec.msgpack.Encoder()
_REQUEST = msgspec.msgpack.Decoder(Request)
_ITEM = msgspec.msgpack.Decoder(list[Next | Fail])


def own_ask(request: Request) -> Ask:
    """A question to a worker of Baton's. Raises InvalidRequest."""
    body = _ENCODER.encode(request)
    _check_length(body)
    if not isinstance(request, GenerateRequest):
        return Ask(name=type(request).__name__, body=body, take=_own_replies, limit_s=None)
    return Ask(name=request.request_id, body=body, take=_own_replies, limit_s=request.deadline_s)


def own_request(body: bytes) -> Request:
    """What a process of Baton's asks. Raises InvalidRequest."""
    _check_length(body)
    try:
        request: Request = _REQUEST.decode(body)
    except UNDECODABLE as error:
        raise InvalidRequest(f"this version of Baton cannot decode the request: {error}") from error
    return request


def own_item(replies: Sequence[Reply] = (), error: BatonError | None = None) -> bytes:
    """One item of an answer: replies, or the error that ends it."""
    signals: list[Next | Fail] = [Next(0, reply) for reply in replies]
    if error is not None:
        signals.append(Fail(0, error.to_wire()))
    return _ENCODER.encode(signals)


def _own_replies(item: Any) -> Iterator[Reply]:
    for signal in _ITEM.decode(msgspec.convert(item, bytes)):
        if isinstance(signal, Fail):
            raise from_wire(signal.error)
        yield signal.reply


def _check_length(body: bytes) -> None:
    if len(body) > MAX_FRAME_BYTES:
        raise InvalidRequest(
            f"a message of {len(body)} bytes exceeds this request plane's limit of {MAX_FRAME_BYTES}"
        )
