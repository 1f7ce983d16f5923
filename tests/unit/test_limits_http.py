"""Requests of keys with limits: refusals in each API's words, and what is counted for whom."""

import asyncio
from typing import Any

from frontend.app import envelope_of
from frontend.http.guards import Authentication
from frontend.http.limits import Quotas, line_of, parse_keys
from tests.scripted_frontend import MODEL, TOKENIZER, Client, Reply, frontend

ANSWER = "<|channel|>final<|message|>Hello<|return|>"
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 99}
NUM_ANSWER_TOKENS = len(TOKENIZER.encode_text(ANSWER, allow_special=True))
MANY = 100_000
ALICE, BOB = {"x-api-key": "alice"}, {"x-api-key": "bob"}


class Keyed:
    """A frontend where `alice` has limits, on a clock that stands still, and `bob` has none."""

    def __init__(self, client: Client, **limits: int) -> None:
        keys = parse_keys(f"{line_of('alice', 'alice', **limits)}\n{line_of('bob', 'bob')}")
        self.client = client
        quotas = Quotas(clock=lambda: 0.0)
        client.app = Authentication(client.app, lambda: keys, envelope_of, quotas, client.services.metrics)

    async def post(self, path: str = CHAT, **fields: object) -> Reply:
        return await self.client.post(path, BODY | fields, ALICE)

    async def num_left(self) -> int:
        """Tokens that alice has left."""
        reply = await self.post(model="none")
        assert reply.status == 404
        return int(reply.headers["x-ratelimit-remaining-tokens"])

    async def get(self, path: str) -> Reply:
        return await self.client.request("GET", path, b"", ALICE)


async def test_a_request_beyond_the_limit_is_a_429_in_the_words_of_the_api_asked() -> None:
    async with frontend(ANSWER) as client:
        keyed = Keyed(client, requests=2)
        assert [(await keyed.post()).status, (await keyed.post("/v1/messages")).status] == [200, 200]
        openai, anthropic = await keyed.post(stream=True), await keyed.post("/v1/messages")
        assert openai.status == anthropic.status == 429
        assert openai.headers["retry-after"] == anthropic.headers["retry-after"] == "30"
        assert openai.headers["x-ratelimit-remaining-requests"] == "0"
        assert (openai.error["type"], openai.error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert anthropic.error["type"] == "rate_limit_error"
        assert len(client.tokens.requests) == 2
        assert (await keyed.get("/v1/models")).status == 200  # only POSTs count
        assert (await client.post(CHAT, BODY, BOB)).status == 200
        label: Any = {"route": "authentication", "model": "", "status": "429"}
        assert client.metric("baton_requests_total", **label) == 2


async def test_the_tokens_of_prompts_and_answers_count_streamed_or_not() -> None:
    async with frontend(ANSWER) as client:
        keyed = Keyed(client, tokens=MANY)
        left = MANY
        for fields, num_answers in ({}, 1), ({"n": 3}, 3), ({"stream": True}, 1):
            assert (await keyed.post(**fields)).status == 200
            left -= len(client.tokens.requests[-1].token_ids) + num_answers * NUM_ANSWER_TOKENS
            assert await keyed.num_left() == left


async def test_a_background_response_counts_when_it_has_ended() -> None:
    async with frontend(ANSWER, script={"pause_at": 3}) as client:
        keyed = Keyed(client, tokens=MANY)
        body = {"model": MODEL, "input": "Hi", "background": True}
        made = await client.post("/v1/responses", body, ALICE)
        assert made.status == 200
        await client.tokens.paused.wait()
        left = MANY - len(client.tokens.requests[0].token_ids)
        assert await keyed.num_left() == left
        client.tokens.go_on.set()
        while (await keyed.get(f"/v1/responses/{made.json['id']}")).json["status"] == "in_progress":
            await asyncio.sleep(0.001)  # poll, like a client
        assert await keyed.num_left() == left - NUM_ANSWER_TOKENS


async def test_tokens_that_are_used_up_refuse_the_next_request_and_not_the_running_one() -> None:
    async with frontend(ANSWER) as client:
        keyed = Keyed(client, tokens=1)
        assert (await keyed.post()).status == 200
        refused = await keyed.post()
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) > 60 * len(client.tokens.requests[0].token_ids)
