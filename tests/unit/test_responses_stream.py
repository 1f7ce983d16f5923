"""The stream of a response, event by event and field by field, against the whole answer."""

import json
from typing import Any

import pytest

from baton.errors import BatonError, Overloaded, WorkerLost
from tests.scripted_frontend import TOKENIZER, Client, Reply, ScriptedTokens

END = "<|end|><|start|>assistant"
THINK = f"<|channel|>analysis<|message|>Think.{END}"
AGAIN = f"<|channel|>analysis<|message|>Once more.{END}"
PREAMBLE = f"<|channel|>commentary<|message|>One moment.{END}"
FINAL = "<|channel|>final<|message|>Hello wörld<|return|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Rome"}<|call|>'
HIDDEN_CALL = f'<|channel|>analysis to=functions.get_time code<|message|>{{"zone": 1{END}'
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "parameters": {}} for name in ("get_weather", "get_time")
]

PLAYED = (
    "<|start|>user<|message|>Thanks<|end|><|start|>functions.get_time to=assistant<|channel|>commentary"
    "<|message|>noon<|end|><|start|>assistant"
)

Item = tuple[str, str]  # what it is, its text; a call is "call NAME"
THOUGHT, ONCE_MORE = ("reasoning", "Think."), ("reasoning", "Once more.")
MOMENT = ("commentary", "One moment.")
HELLO, WEATHER = ("final_answer", "Hello wörld"), ("call get_weather", '{"city":"Rome"}')
CASES: list[tuple[str, list[Item]]] = [
    (FINAL, [HELLO]),
    (THINK + FINAL, [THOUGHT, HELLO]),
    (THINK + AGAIN + FINAL, [THOUGHT, ONCE_MORE, HELLO]),
    (THINK + PREAMBLE + CALL, [THOUGHT, MOMENT, WEATHER]),
    (PREAMBLE + FINAL, [MOMENT, HELLO]),
    (HIDDEN_CALL + CALL, [("call get_time", '{"zone": 1'), WEATHER]),
    (CALL.replace('{"city":"Rome"}', ""), [("call get_weather", "")]),
    ("", []),
    (THINK + PLAYED + FINAL, [THOUGHT, HELLO]),
    ("<|channel|>commentary to=assistant<|channel|>commentary?commentary?" + END + FINAL, [HELLO]),
    ("Just text", [("final_answer", "Just text")]),
]


async def respond(*texts: str, script: dict[str, Any] | None = None, **fields: Any) -> Reply:
    return await Client(ScriptedTokens(*texts, **(script or {}))).respond(**fields)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response without random ids and times."""
    text = json.dumps(response | {"id": "", "created_at": 0, "completed_at": 0})
    for item in response["output"]:
        for name in ("id", "call_id"):
            text = text.replace(f'"{item.get(name)}"', f'"{name}"')
    found: dict[str, Any] = json.loads(text)
    return found


def check_item(events: list[dict[str, Any]], index: int, kind: str, text: str, status: str) -> dict[str, Any]:
    """Takes an item's events from the front of `events`; returns the item at its end."""
    item = events[0]["item"]
    added: dict[str, Any] = {"id": item["id"], "status": "in_progress"}
    part: dict[str, Any] = {"text": ""}
    match kind.split():
        case ["reasoning"]:
            prefix, name = "rs", "response.reasoning_text"
            added |= {"type": "reasoning", "summary": [], "content": []}
            part |= {"type": "reasoning_text"}
        case ["call", tool]:
            prefix, name = "fc", "response.function_call_arguments"
            added |= {"type": "function_call", "call_id": item["call_id"], "name": tool, "arguments": ""}
        case _:
            prefix, name = "msg", "response.output_text"
            added |= {"type": "message", "role": "assistant", "content": [], "phase": kind}
            part |= {"type": "output_text", "annotations": [], "logprobs": []}
    assert item["id"].startswith(f"{prefix}_")
    place = {"item_id": item["id"], "output_index": index}
    filled: dict[str, Any] = {"content": [part | {"text": text}]}
    parts: list[dict[str, Any]] = [part, part | {"text": text}]
    logprobs: dict[str, Any] = {"logprobs": []} if prefix == "msg" else {}
    last = {"text": text, **logprobs}
    if prefix == "fc":
        assert item["call_id"].startswith("call_")
        filled, parts, last = {"arguments": text}, [], {"name": added["name"], "arguments": text}
    else:
        place["content_index"] = 0
    whole = added | filled | {"status": status}
    deltas = [event["delta"] for event in events if event.get("item_id") == item["id"] and "delta" in event]
    assert "".join(deltas) == text
    expected = [
        {"type": "response.output_item.added", "output_index": index, "item": added},
        *({"type": "response.content_part.added", **place, "part": part} for part in parts[:1]),
        *({"type": f"{name}.delta", **place, "delta": delta, **logprobs} for delta in deltas),
        {"type": f"{name}.done", **place, **last},
        *({"type": "response.content_part.done", **place, "part": part} for part in parts[1:]),
        {"type": "response.output_item.done", "output_index": index, "item": whole},
    ]
    assert [events.pop(0) for _ in expected] == expected
    return whole


def numbered(reply: Reply) -> list[dict[str, Any]]:
    """The events without their numbers, which have no gaps."""
    names = [line[7:] for line in reply.body.decode().split("\n") if line.startswith("event: ")]
    events = reply.events
    assert names == [event["type"] for event in events]
    for i, event in enumerate(events):
        assert event.pop("sequence_number") == i
    return events


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 1000])
@pytest.mark.parametrize(("text", "items"), CASES)
async def test_each_item_has_its_events_in_order_and_the_end_has_it_all(
    text: str, items: list[Item], tokens_per_chunk: int
) -> None:
    script = {"tokens_per_chunk": tokens_per_chunk}
    text = text or "<|return|>"
    reply = await respond(text, script=script, stream=True, tools=TOOLS)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = numbered(reply)
    created, in_progress, last = events.pop(0), events.pop(0), events.pop()
    begun = created["response"]
    assert created == {"type": "response.created", "response": begun}
    assert in_progress == {"type": "response.in_progress", "response": begun}
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    output = [check_item(events, i, kind, written, "completed") for i, (kind, written) in enumerate(items)]
    assert events == []
    ended = last["response"]
    assert last == {"type": "response.completed", "response": ended}
    differing = ("status", "output", "usage", "completed_at")
    assert ended | dict.fromkeys(differing) == begun | dict.fromkeys(differing)
    assert (ended["status"], ended["output"]) == ("completed", output)
    whole = await respond(text, script=script, tools=TOOLS)
    assert without_ids(ended) == without_ids(whole.json)


async def test_the_usage_counts_input_output_reasoning_and_cached_tokens() -> None:
    client = Client(ScriptedTokens(THINK + FINAL))
    usage = (await client.respond()).json["usage"]
    num_input = len(client.tokens.requests[0].token_ids)
    num_output = len(TOKENIZER.encode_text(THINK + FINAL, allow_special=True))
    assert usage == {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 6},
        "total_tokens": num_input + num_output,
    }


@pytest.mark.parametrize("tokens_per_chunk", [3, 1000])
@pytest.mark.parametrize(
    ("written", "items"),
    [
        ("<|channel|>ana", []),
        ("<|channel|>analysis<|message|>Thi", [("reasoning", "Thi", "incomplete")]),
        (THINK, [(*THOUGHT, "completed")]),
        (
            THINK + "<|channel|>final<|message|>Hello",
            [(*THOUGHT, "completed"), ("final_answer", "Hello", "incomplete")],
        ),
    ],
)
async def test_an_answer_cut_by_its_token_limit_is_incomplete_and_so_is_the_item_that_was_cut(
    written: str, items: list[tuple[str, str, str]], tokens_per_chunk: int
) -> None:
    limit = len(TOKENIZER.encode_text(written, allow_special=True))
    script = {"tokens_per_chunk": tokens_per_chunk}
    events = numbered(await respond(THINK + FINAL, script=script, stream=True, max_output_tokens=limit))[2:]
    last = events.pop()
    output = [check_item(events, i, *item) for i, item in enumerate(items)]
    assert events == []
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"] == output
    assert last["response"]["completed_at"] is None
    whole = (await respond(THINK + FINAL, script=script, max_output_tokens=limit)).json
    assert without_ids(whole) == without_ids(last["response"])


@pytest.mark.parametrize(
    ("error", "code"), [(WorkerLost("Dead."), "server_error"), (Overloaded("Full."), "rate_limit_exceeded")]
)
async def test_a_failure_in_mid_stream_is_a_failed_response_and_the_end(error: BatonError, code: str) -> None:
    reply = await respond(THINK + FINAL, stream=True, script={"fail_at": 40, "error": error})
    assert reply.status == 200
    last = numbered(reply)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": code, "message": error.message}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


@pytest.mark.parametrize("background", [False, True])
async def test_a_prompt_that_is_too_long_fails_in_the_stream(background: bool) -> None:
    client = Client(ScriptedTokens(FINAL))
    reply = await client.respond("x" * 10_000, stream=True, background=background)
    stored = await client.get(f"/v1/responses/{reply.events[-1]['response']['id']}")
    events = reply.events  # the SDK's types lack the code, which agents need to compact their history
    kinds = [(event["type"], event["sequence_number"]) for event in events]
    assert kinds == [("response.created", 0), ("response.in_progress", 1), ("response.failed", 2)]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")
    assert (failed["store"], stored.status) == (False, 404)
    assert not client.tokens.requests


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [({"top_logprobs": 1}, 1), ({"include": ["message.output_text.logprobs"]}, 0), ({}, None)],
)
async def test_log_probabilities_are_in_the_deltas_and_in_the_whole(
    fields: dict[str, Any], num_top: int | None
) -> None:
    client = Client(ScriptedTokens(FINAL))
    events = numbered(await client.respond(stream=True, **fields))
    assert client.tokens.requests[0].sampling.logprobs == num_top
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    (done,) = [e for e in events if e["type"] == "response.output_text.done"]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert [entry for entries in deltas for entry in entries] == done["logprobs"]
    assert [entry["token"] for entry in done["logprobs"]] == [entry["token"] for entry in part["logprobs"]]
    entries = [] if num_top is None else [("H", [72], num_top)]
    shown = [(entry["token"], entry["bytes"], len(entry["top_logprobs"])) for entry in part["logprobs"]]
    assert shown[:1] == entries
