"""The OpenAI SDK's Responses client against the app, as it is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, NotFoundError
from pydantic import BaseModel

from tests.scripted_frontend import MODEL, Client, ScriptedTokens
from tests.waiting import PATIENCE_S

THINK = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
ANSWER = THINK + "<|channel|>final<|message|>Hello wörld<|return|>"
CALL = THINK + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x":1}<|call|>'
JSON_ANSWER = '<|channel|>final<|message|>{"city":"Rome"}<|return|>'
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


class Place(BaseModel):
    city: str


@asynccontextmanager
async def sdk_of(text: str) -> AsyncIterator[AsyncOpenAI]:
    transport = httpx2.ASGITransport(app=Client(ScriptedTokens(text)).app)
    http = httpx2.AsyncClient(transport=transport)
    async with (
        asyncio.timeout(PATIENCE_S),
        AsyncOpenAI(base_url="http://baton/v1", api_key="none", http_client=http) as sdk,
    ):
        yield sdk


async def test_create_retrieve_list_and_delete() -> None:
    async with sdk_of(ANSWER) as sdk:
        made = await sdk.responses.create(model=MODEL, input="Hi", instructions="Be kind.")
        assert made.output_text == "Hello wörld"
        assert made.output[0].type == "reasoning"
        assert made.output[0].content is not None
        assert made.output[0].content[0].text == "Think."
        assert (await sdk.responses.retrieve(made.id)).to_dict() == made.to_dict()
        items = [item async for item in sdk.responses.input_items.list(made.id, limit=1, order="asc")]
        assert [item.type for item in items] == ["message"]
        await sdk.responses.delete(made.id)
        with pytest.raises(NotFoundError):
            await sdk.responses.retrieve(made.id)


async def test_the_streaming_helper_ends_with_the_response_that_is_stored() -> None:
    async with sdk_of(ANSWER) as sdk:
        async with sdk.responses.stream(model=MODEL, input="Hi", tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        stored = await sdk.responses.retrieve(final.id)
        assert stored.output_text == final.output_text
        assert stored.usage == final.usage


async def test_a_stream_is_retrieved_from_an_event_on() -> None:
    async with sdk_of(ANSWER) as sdk:
        stream = await sdk.responses.create(model=MODEL, input="Hi", stream=True, background=True)
        events = [event async for event in stream]
        assert events[0].type == "response.created"
        rest = await sdk.responses.retrieve(events[0].response.id, stream=True, starting_after=3)
        assert [event.to_dict() async for event in rest] == [event.to_dict() for event in events[4:]]


async def test_a_tool_conversation_goes_on_by_id_and_by_items() -> None:
    async with sdk_of(CALL) as sdk:
        first = await sdk.responses.create(model=MODEL, input="Hi", tools=[TOOL])
        call = first.output[-1]
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        by_id = await sdk.responses.create(
            model=MODEL, input=[result], previous_response_id=first.id, tools=[TOOL]
        )
        said: Any = [{"role": "user", "content": "Hi"}, *(item.to_dict() for item in first.output), result]
        by_items = await sdk.responses.create(model=MODEL, input=said, tools=[TOOL], store=False)
        assert by_id.usage is not None
        assert by_items.usage is not None
        assert by_id.usage.input_tokens == by_items.usage.input_tokens


async def test_a_background_response_is_polled_and_cancelled() -> None:
    async with sdk_of(ANSWER) as sdk:
        made = await sdk.responses.create(model=MODEL, input="Hi", background=True)
        cancelled = await sdk.responses.cancel(made.id)
        assert cancelled.id == made.id
        assert cancelled.status == "cancelled"


async def test_structured_output_is_parsed() -> None:
    async with sdk_of(JSON_ANSWER) as sdk:
        parsed = await sdk.responses.parse(model=MODEL, input="Where?", text_format=Place)
        assert parsed.output_parsed == Place(city="Rome")
