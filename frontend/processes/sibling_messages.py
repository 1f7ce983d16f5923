"""The messages between a frontend's processes, and their frames."""

import asyncio
from array import array
from typing import Any

import msgspec

from baton.errors import ErrorInfo
from frontend.http.limits import Used
from frontend.metrics import Sampled
from frontend.turn.thoughts import Kept

MAX_FRAME_BYTES = 64 << 20
_LENGTH_BYTES = 4


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Add an entry to the reasoning kept; no answer."""

    kept: Kept


class Scrape(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answered with the process's metrics."""


class StopRun(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Cancel a background run; answered with `Found` once it is stored, if the process has it."""

    response_id: str


class FollowRun(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Answered with `Found` and the run's events, if the process has it."""

    response_id: str
    sequence_number: int


class Spend(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """An API key was used; no answer."""

    used: Used


class Found(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The process has the run."""


class Values(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The process's metrics."""

    metrics: list[Sampled]


class Events(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Some events of the run that is followed."""

    data: bytes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The request failed."""

    error: ErrorInfo


class Done(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The answer is complete."""


Question = Keep | Spend | Scrape | StopRun | FollowRun
Answer = Found | Values | Events | Refused | Done


def _token_ids(kind: type, value: object) -> object:
    if kind is array and isinstance(value, list):
        return array("I", value)
    raise NotImplementedError(kind)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=list)
QUESTIONS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Question, dec_hook=_token_ids)
ANSWERS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)


async def read(reader: asyncio.StreamReader) -> bytes:
    """The next frame's message. Raises ConnectionAbortedError or IncompleteReadError."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
    if length > MAX_FRAME_BYTES:
        raise ConnectionAbortedError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


def frame(message: Question | Answer) -> bytes:
    """The message with its length."""
    data = _ENCODER.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES) + data
