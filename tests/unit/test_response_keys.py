"""A response belongs to the name of the key that created it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from frontend.http.guards import Guards
from frontend.http.keys import line_of, parse_keys
from tests.scripted_frontend import MODEL, Client, Reply, frontend

ANSWER = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>"
KEYS = parse_keys("\n".join(line_of(key.split()[0], key) for key in ("alice 1", "alice 2", "bob 1")))
ALICE, NEW_ALICE, BOB = ({"x-api-key": key} for key in ("alice 1", "alice 2", "bob 1"))
BODY = {"model": MODEL, "input": "Hi"}
PATH = "/v1/responses"


@asynccontextmanager
async def keyed(text: str = ANSWER, **settings: Any) -> AsyncIterator[Client]:
    async with frontend(text, **settings) as client:
        client.app = Guards(client.app, client.services.metrics, keys=lambda: KEYS)
        yield client


async def create(client: Client, headers: dict[str, str], **fields: object) -> Reply:
    return await client.post(PATH, BODY | fields, headers)


async def every_use(client: Client, response_id: str, item_id: str, headers: dict[str, str]) -> list[Any]:
    """(status, code) of each way to a response: read, list, go on with, refer to, cancel, delete."""
    one = f"{PATH}/{response_id}"
    replies = [
        await client.request("GET", one, b"", headers),
        await client.request("GET", f"{one}?stream=true", b"", headers),
        await client.request("GET", f"{one}/input_items", b"", headers),
        await create(client, headers, previous_response_id=response_id),
        await client.post(f"{PATH}/input_tokens", BODY | {"previous_response_id": response_id}, headers),
        await create(client, headers, input=[{"type": "item_reference", "id": item_id}]),
        await client.request("POST", f"{one}/cancel", b"", headers),
        await client.request("DELETE", one, b"", headers),
    ]
    return [(reply.status, None if reply.status == 200 else reply.error["code"]) for reply in replies]


MISSING = [
    *[(404, "response_not_found")] * 3,
    *[(400, "previous_response_not_found")] * 2,
    (400, "invalid_request"),
    *[(404, "response_not_found")] * 2,
]


async def test_another_key_finds_nothing_and_a_new_key_of_that_name_finds_all() -> None:
    async with keyed() as client:
        made = (await create(client, ALICE)).json
        item_id = made["output"][-1]["id"]
        assert await every_use(client, made["id"], item_id, BOB) == MISSING
        assert await every_use(client, "resp_none", "msg_none", BOB) == MISSING  # the same words
        again = await client.request("GET", f"{PATH}/{made['id']}", b"", NEW_ALICE)
        assert again.json == made
        used = await every_use(client, made["id"], item_id, NEW_ALICE)
        assert [status for status, _ in used] == [200, 400, 200, 200, 200, 200, 400, 200]


async def test_another_key_does_not_touch_a_running_response() -> None:
    async with keyed(script={"pause_at": 1}) as client:
        made = (await create(client, ALICE, background=True, stream=False)).json
        assert await every_use(client, made["id"], "msg_none", BOB) == MISSING
        found = await client.request("GET", f"{PATH}/{made['id']}", b"", ALICE)
        assert found.json["status"] in {"queued", "in_progress"}
        stored = await client.responses.store.load(made["id"], "alice")
        assert stored is not None


async def test_responses_from_before_there_were_keys_belong_to_none_of_them() -> None:
    async with frontend(ANSWER) as client:
        made = (await client.post(PATH, BODY, ALICE)).json  # not checked
        assert (await client.get(f"{PATH}/{made['id']}")).status == 200
        client.app = Guards(client.app, client.services.metrics, keys=lambda: KEYS)
        assert (await client.request("GET", f"{PATH}/{made['id']}", b"", ALICE)).status == 404


async def test_reasoning_is_remembered_under_the_keys_name() -> None:
    text = ANSWER.replace("final<|message|>Hello<|return|>", "commentary to=functions.f<|message|>{}<|call|>")
    async with keyed(text) as client:
        tools = [{"type": "function", "name": "f"}]
        [_, call] = (await create(client, ALICE, store=False, tools=tools)).json["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
        body = BODY | {"input": [{"role": "user", "content": "Hi"}, call, result]}
        replies = [await client.post(f"{PATH}/input_tokens", body, key) for key in (BOB, NEW_ALICE)]
        without, remembered = (reply.json["input_tokens"] for reply in replies)
        assert remembered > without
