"""Loads the items that a response continues: those of previous responses, and referenced ones."""

import msgspec

from baton.errors import BatonError, InvalidRequest
from frontend.responses.given import GivenReference
from frontend.responses.items import Item, OutputItem
from frontend.responses.object import RUNNING
from frontend.responses.runs import ResponseState
from frontend.responses.store import ResponseStore


class PreviousNotFound(BatonError):
    """The previous response, or one that it continues, is not stored."""

    code = "previous_response_not_found"
    status = 400
    kind = "invalid_request_error"


class _Output(msgspec.Struct):
    output: list[OutputItem]


async def history(response_id: str, responses: ResponseState, key_name: str) -> list[Item]:
    """All input and output items up to the end of the previous response, one of that key."""
    runs_here = await responses.run(response_id, key_name) is not None
    previous = None if runs_here else await responses.store.load(response_id, key_name)
    if runs_here or (previous is not None and previous.status == RUNNING):
        raise InvalidRequest(
            f"`previous_response_id`: response {response_id!r} is still in progress; wait until it ends.",
            param="previous_response_id",
        )
    items = await context_items(response_id, responses.store, key_name)
    if previous is None or items is None:
        raise PreviousNotFound(
            f"`previous_response_id`: response {response_id!r} or one that it continues is not stored.",
            param="previous_response_id",
        )
    return items + list(msgspec.json.decode(previous.body, type=_Output).output)


async def context_items(response_id: str, store: ResponseStore, key_name: str) -> list[Item] | None:
    """All input of a stored response: the conversation that it continues, then its own items; None if part of
    it is no longer stored."""
    chain = await store.chain(response_id, key_name)
    if chain is None:
        return None
    items: list[Item] = []
    for response in chain:
        items += msgspec.json.decode(response.items, type=list[Item])
        if response.id != response_id:
            items += msgspec.json.decode(response.body, type=_Output).output
    return items


async def resolved(item: Item | GivenReference, index: int, store: ResponseStore, key_name: str) -> Item:
    """The item, or the one that `input[index]` refers to. Raises InvalidRequest if it is not stored."""
    if not isinstance(item, GivenReference):
        return item
    stored = await store.with_item(item.id, key_name)
    if stored is not None:
        known = msgspec.json.decode(stored.items, type=list[Item])
        known += msgspec.json.decode(stored.body, type=_Output).output
        for candidate in known:
            if candidate.id == item.id:
                return candidate
    raise InvalidRequest(
        f"`input[{index}].id`: no stored response has an item with id {item.id!r}.",
        param=f"input[{index}].id",
    )
