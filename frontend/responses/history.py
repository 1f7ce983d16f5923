"""What a response goes on from: the items of the responses before it, and those that it refers to."""

import msgspec

from baton.errors import BatonError, InvalidRequest
from frontend.responses.given import GivenReference
from frontend.responses.items import Item, OutputItem
from frontend.responses.object import RUNNING
from frontend.responses.runs import ResponseState
from frontend.responses.store import ResponseStore


class PreviousNotFound(BatonError):
    """There is no such response to go on from, or not all of what it goes on from."""

    code = "previous_response_not_found"
    status = 400
    kind = "invalid_request_error"


class _Output(msgspec.Struct):
    output: list[OutputItem]


async def history(response_id: str, responses: ResponseState) -> list[Item]:
    """All that was said up to the end of the previous response."""
    runs_here = await responses.runs.get(response_id) is not None
    previous = None if runs_here else await responses.store.load(response_id)
    if runs_here or (previous is not None and previous.status == RUNNING):
        raise InvalidRequest(
            f"The response {response_id!r} is still in progress; wait for its end.",
            param="previous_response_id",
        )
    items = await context_items(response_id, responses.store)
    if previous is None or items is None:
        raise PreviousNotFound(
            f"The response {response_id!r} is not stored here, or not with all that it continues.",
            param="previous_response_id",
        )
    return items + list(msgspec.json.decode(previous.body, type=_Output).output)


async def context_items(response_id: str, store: ResponseStore) -> list[Item] | None:
    """All input of a stored response: what it continues, with the answers, then its own; None if it is not
    stored any more."""
    chain = await store.chain(response_id)
    if chain is None:
        return None
    items: list[Item] = []
    for response in chain:
        items += msgspec.json.decode(response.items, type=list[Item])
        if response.id != response_id:
            items += msgspec.json.decode(response.body, type=_Output).output
    return items


async def resolved(item: Item | GivenReference, index: int, store: ResponseStore) -> Item:
    """The item itself where `input[index]` refers to one. Raises InvalidRequest if it is not stored."""
    if not isinstance(item, GivenReference):
        return item
    stored = await store.with_item(item.id)
    if stored is not None:
        known = msgspec.json.decode(stored.items, type=list[Item])
        known += msgspec.json.decode(stored.body, type=_Output).output
        for candidate in known:
            if candidate.id == item.id:
                return candidate
    raise InvalidRequest(
        f"`input[{index}].id`: no stored response has an item {item.id!r}.", param=f"input[{index}].id"
    )
