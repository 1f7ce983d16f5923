"""A setting of Baton's own among those of a library: how many requests may wait for a place in the batch."""

from collections.abc import Mapping
from typing import Any

import msgspec

from workers.settings import InvalidField, Schema

QUEUE_SIZE = "max_queue_size"
_DEFAULT = 256


class WithQueueSize:
    """The root schema of a library's settings, with QUEUE_SIZE, which the library does not get."""

    def __init__(self, library: Schema) -> None:
        self._library = library

    def fields(self) -> Mapping[str, Schema | None]:
        """See `Schema`."""
        return {**self._library.fields(), QUEUE_SIZE: None}

    def nullable(self, name: str) -> bool:
        """See `Schema`."""
        return self._library.nullable(name)

    def convert(self, name: str, value: object) -> object:
        """See `Schema`."""
        return msgspec.convert(value, int) if name == QUEUE_SIZE else self._library.convert(name, value)

    def default(self, name: str) -> object:
        """See `Schema`."""
        return _DEFAULT if name == QUEUE_SIZE else self._library.default(name)

    def build(self, values: dict[str, Any]) -> Any:
        """See `Schema`."""
        if values.get(QUEUE_SIZE, 0) < 0:
            raise InvalidField(QUEUE_SIZE, f"{values[QUEUE_SIZE]}: must be 0 or more")
        return self._library.build({name: value for name, value in values.items() if name != QUEUE_SIZE})
