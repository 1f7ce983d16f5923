"""Loads the items that a response continues: those of previous responses, and referenced ones."""

import asyncio
from collections.abc import Sequence

import msgspec

from baton.errors import BatonError, InvalidRequest
from frontend.responses.given import GivenReference
from frontend.responses.items import Item, OutputItem
from frontend.responses.object import RUNNING
from frontend.responses.runs import ResponseState
from frontend.responses.store import ResponseStore
from frontend.responses.stored import StoredResponse

MAX_REFERENCES = 1000
"""Each is looked up in the store."""


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
    return await asyncio.to_thread(_items_of, chain, response_id)


def _items_of(chain: Sequence[StoredResponse], last_id: str) -> list[Item]:
    """The input of each response, and the output of all but the last."""
    items: list[Item] = []
    for response in chain:
        items += msgspec.json.decode(response.items, type=list[Item])
        if response.id != last_id:
            items += msgspec.json.decode(response.body, type=_Output).output
    return items


async def resolved(given: Sequence[Item | GivenReference], store: ResponseStore, key_name: str) -> list[Item]:
    """The items of `input`, with those that it refers to. Raises InvalidRequest if one is not stored."""
    if sum(isinstance(item, GivenReference) for item in given) > MAX_REFERENCES:
        raise InvalidRequest(
            f"`input` has more than {MAX_REFERENCES} item references; send the items.", param="input"
        )
    return [
        await _referred(item.id, f"input[{i}].id", store, key_name)
        if isinstance(item, GivenReference)
        else item
        for i, item in enumerate(given)
    ]


async def _referred(item_id: str, path: str, store: ResponseStore, key_name: str) -> Item:
    stored = await store.with_item(item_id, key_name)
    if stored is not None:
        for candidate in await asyncio.to_thread(_all_items, stored):
            if candidate.id == item_id:
                return candidate
    raise InvalidRequest(f"`{path}`: no stored response has an item with id {item_id!r}.", param=path)


def _all_items(stored: StoredResponse) -> list[Item]:
    known = msgspec.json.decode(stored.items, type=list[Item])
    return [*known, *msgspec.json.decode(stored.body, type=_Output).output]
