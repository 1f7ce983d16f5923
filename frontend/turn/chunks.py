"""The constant parts of chat and completion chunks, encoded once per stream."""

import importlib.metadata
import time
from collections.abc import Sequence

import msgspec

from frontend.turn.choice import Choice
from frontend.turn.ids import new_id
from frontend.turn.usage import UsageBody

SYSTEM_FINGERPRINT = f"baton-{importlib.metadata.version('baton')}"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class Envelope:
    """The fields shared by all chunks of an answer. `head` is a chunk up to its list of choices, `tail` is
    everything after that list."""

    def __init__(self, kind: str, id_prefix: str, model: str, *, has_usage: bool) -> None:
        self.id = new_id(id_prefix, "-")
        self.created = int(time.time())
        self.model = model
        self._has_usage = has_usage
        fixed = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        self.head = b"data: " + _encode(fixed)[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """The usage, if requested, and the end of the stream."""
        if not self._has_usage:
            return DONE
        return self.head + b'],"usage":' + _encode(UsageBody.of(choices)) + b"}\n\n" + DONE
