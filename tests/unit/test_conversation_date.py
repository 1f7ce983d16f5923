"""A conversation's prompt names the date on which it began, so that midnight does not change it."""

from typing import Any

from tests.scripted_frontend import MODEL, TOKENIZER, Client, ScriptedFleet, ScriptedTokens

Json = dict[str, Any]

HI: Json = {"role": "user", "content": "Hi"}
F: Json = {"type": "function", "function": {"name": "f"}}
CALL = (
    "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
    " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
)


async def test_a_conversation_with_calls_keeps_the_date_of_its_beginning() -> None:
    client, fleet = on_a_fleet(CALL)
    said = [HI]
    for day in ("2026-11-21", "2026-11-22", "2026-11-23"):
        fleet.current_date = day
        said += await turn_of(client, said)
    await turn_of(client, [HI])
    assert dates(client) == ["2026-11-21"] * 3 + ["2026-11-23"]
    counted = await client.post("/tokenize", {"model": MODEL, "messages": said[:-2], "tools": [F]})
    assert counted.json["tokens"] == client.tokens.requests[2].token_ids


async def test_an_answer_of_another_conversation_gives_no_date() -> None:
    client, fleet = on_a_fleet(CALL)
    said = [HI, *(await turn_of(client, [HI]))]
    fleet.current_date = "2026-11-22"
    said[1]["content"] = "Changed."
    await turn_of(client, said)
    assert dates(client) == ["2026-11-21", "2026-11-22"]


async def test_frontends_that_do_not_know_each_other_agree_after_a_turn_each() -> None:
    here, there = on_a_fleet(CALL), on_a_fleet(CALL)
    said = [HI, *(await turn_of(here[0], [HI]))]
    for client, fleet in (there, here, there):
        fleet.current_date = "2026-11-22"
        said += await turn_of(client, said)
    assert dates(here[0]) == ["2026-11-21", "2026-11-22"]
    assert dates(there[0]) == ["2026-11-22"] * 2


def on_a_fleet(text: str) -> tuple[Client, ScriptedFleet]:
    fleet = ScriptedFleet()
    return Client(ScriptedTokens(text), fleet), fleet


async def turn_of(client: Client, said: list[Json]) -> list[Json]:
    """The answer to what was said so far, as a client keeps it, and what is said next."""
    reply = await client.chat(messages=said, tools=[F])
    message = reply.json["choices"][0]["message"]
    answer = {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}
    calls = answer.get("tool_calls")
    return [answer, {"role": "tool", "tool_call_id": calls[0]["id"], "content": "ok"} if calls else HI]


def dates(client: Client) -> list[str]:
    texts = (TOKENIZER.decode(request.token_ids, shows_special=True) for request in client.tokens.requests)
    return [text.partition("Current date: ")[2][:10] for text in texts]
