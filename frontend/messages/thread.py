"""Threads: conversations that Anthropic's servers keep, and Baton does not."""

from typing import Literal

import msgspec

from baton.errors import BatonError


class Thread(msgspec.Struct, kw_only=True):
    """Starts a thread, or continues it after a message that the server is to know."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class ThreadNotFound(BatonError):
    """Threads are not kept here; send the whole conversation with every request."""

    code = "thread_not_found"
    status = 404
    kind = "invalid_request_error"


def check_thread(thread: Thread | None) -> None:
    """Raises ThreadNotFound for a request that continues a thread, at which Anthropic's SDKs send the whole
    conversation again. The request that starts one already contains it."""
    if thread is not None and thread.type == "continue":
        raise ThreadNotFound(
            "`thread`: this server keeps no conversations; send all messages, without `thread` or with "
            '`{"type": "create"}`.',
            param="thread",
        )
