"""A response as the store keeps it."""

import msgspec

from frontend.responses.items import RUNNING


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A stored response. `body` is its JSON, `items` the JSON array of its own input items, `events` its
    whole stream, if any, as server-sent events. It belongs to the API key `key_name`, and if that is empty to
    everyone, as long as keys are not checked. While another frontend process runs it, `runs_at` is that one's
    address, empty if it has none."""

    id: str
    status: str
    body: bytes
    items: bytes
    previous_id: str | None = None
    is_background: bool = False
    events: bytes | None = None
    key_name: str = ""
    runs_at: str = ""

    @property
    def is_first(self) -> bool:
        """Whether no version of it was stored before: one in the background is stored when it begins, too."""
        return self.status == RUNNING or not self.is_background

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return len(self.body) + len(self.items) + len(self.events or b"")
