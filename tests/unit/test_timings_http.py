"""What a client learns about its own request: `Server-Timing`, `timings` in a stream's last chunk."""

import re
from typing import Any

import pytest

from baton.errors import Overloaded
from frontend.record import STAGES
from tests.scripted_frontend import BODIES, MODEL, Client, Reply, ScriptedTokens

ANSWER = "<|channel|>final<|message|>Yes<|return|>"
CHAT = "/v1/chat/completions"
TIMINGS: dict[str, Any] = {"stream": True, "stream_options": {"include_timings": True}}


async def post(path: str, tokens: ScriptedTokens | None = None, **fields: Any) -> Reply:
    client = Client(tokens or ScriptedTokens(ANSWER))
    return await client.post(path, {"model": MODEL, **BODIES[path], **fields})


def stages(reply: Reply) -> dict[str, float]:
    """Those of the header, which has names and milliseconds only."""
    parts = reply.headers["server-timing"].split(", ")
    found = [re.fullmatch(r"([a-z_]+);dur=(\d+\.\d)", part) for part in parts]
    return {each[1]: float(each[2]) for each in found if each is not None and each[1] in STAGES}


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_answer_has_its_stages_in_server_timing(path: str) -> None:
    reply = await post(path)
    assert reply.status == 200
    assert {"read", "render"} <= stages(reply).keys()
    assert len(stages(reply)) == reply.headers["server-timing"].count("dur=")
    assert "server-timing" not in (await post(path, stream=True)).headers


async def test_a_refused_request_has_the_stages_until_then() -> None:
    invalid = await post(CHAT, n=-1)
    full = await post(CHAT, ScriptedTokens(ANSWER, refuses_with=Overloaded("full", retry_after_s=1)))
    assert (invalid.status, full.status) == (400, 429)
    assert {"read", "render"} <= stages(invalid).keys() & stages(full).keys()
    assert "server-timing" not in (await Client(ScriptedTokens()).get("/v1/responses/resp_1")).headers


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("num", [1, 2])
async def test_the_usage_chunk_has_the_timings_on_request(path: str, num: int) -> None:
    reply = await post(path, n=num, **TIMINGS)
    *chunks, last, done = reply.events
    assert (done, last["choices"]) == ("[DONE]", [])
    assert last["usage"]["total_tokens"] > 0
    assert not any("timings" in chunk for chunk in chunks)
    timings = last["timings"]
    assert {"read", "render"} <= timings["stages"].keys() <= set(STAGES)
    assert 0 < timings["ttft_ms"] <= timings["duration_ms"]
    assert timings["longest_gap_ms"] <= timings["duration_ms"]
    assert timings["attempts"] == 0  # the scripted model has no workers


async def test_timings_come_only_on_request_and_only_for_streams() -> None:
    unasked = await post(CHAT, stream=True, stream_options={"include_usage": True, "include_timings": None})
    assert "timings" not in unasked.events[-2]
    for fields in ({**TIMINGS, "stream": False}, {**TIMINGS, "stream_options": {"include_timings": 1}}):
        refused = await post(CHAT, **fields)
        assert refused.status == 400
        assert refused.error["param"].startswith("stream_options")
