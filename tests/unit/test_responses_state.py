"""What outlives a request of the Responses API: stored responses, background runs, resumed streams."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import NotReady
from frontend.responses import runs
from frontend.responses.runs import CallRun, ResponseState
from frontend.responses.store import ResponseStore
from tests.clock import jumping, now_s
from tests.scripted_frontend import MODEL, Client, ScriptedTokens, ended, frontend
from tests.stored_responses import response

THINK = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
ANSWER = THINK + "<|channel|>final<|message|>Hello<|return|>"
CALL = THINK + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x":1}<|call|>'
TOOLS = [{"type": "function", "name": "f"}]


async def test_a_stored_response_can_be_had_again_until_it_is_deleted() -> None:
    async with frontend(ANSWER) as client:
        made = (await client.respond()).json
        url = f"/v1/responses/{made['id']}"
        assert (await client.get(url)).json == made
        assert (await client.request("HEAD", url, b"")).status == 200
        assert (await client.delete(url)).json == {
            "id": made["id"], "object": "response", "deleted": True,
        }  # fmt: skip
        gone = await client.get(url)
        assert (gone.status, gone.error["code"]) == (404, "response_not_found")
        assert (await client.delete(url)).status == 404
        assert (await client.get(url + "/input_items")).status == 404
        unstored = (await client.respond(store=False)).json
        assert (await client.get(f"/v1/responses/{unstored['id']}")).status == 404


async def test_a_conversation_goes_on_from_the_previous_response_without_its_instructions() -> None:
    async with frontend(CALL) as client:
        first = (await client.respond("One", instructions="Old rule.", tools=TOOLS)).json
        call_id = first["output"][1]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "Two"}
        continued = {"previous_response_id": first["id"], "instructions": "New rule."}
        second = await client.respond([result], **continued, tools=TOOLS)
        prompt = client.prompt
        assert "Old rule." not in prompt
        assert "New rule." in prompt
        assert prompt.endswith(
            "userOneassistantanalysisThink.assistantcommentary to=functions.f json"
            '{"x":1}functions.f to=assistantcommentaryTwoassistant'
        )
        await client.respond("Three", previous_response_id=second.json["id"])
        assert client.prompt.count("Think.") == 2


@pytest.mark.parametrize("body", [{}, {"input": None}, {"input": []}])
async def test_a_previous_response_may_be_continued_without_input(body: dict[str, Any]) -> None:
    async with frontend(ANSWER) as client:
        first = (await client.respond("One")).json
        sent = {"model": MODEL, "previous_response_id": first["id"], **body}
        reply = await client.post("/v1/responses", sent)
        assert reply.status == 200
        assert client.prompt.endswith("userOneassistantfinalHelloassistant")
        refused = await client.post("/v1/responses", {"model": MODEL, **body})
        assert (refused.status, refused.error["param"]) == (400, "input")
        result = {"type": "function_call_output", "call_id": "c", "output": "x"}
        fault = await client.respond([result], previous_response_id=first["id"])
        assert (fault.status, fault.error["param"]) == (400, "input[0].call_id")


async def test_input_items_are_the_whole_history_page_by_page() -> None:
    async with frontend(ANSWER) as client:
        first = (await client.respond("One")).json
        second = (await client.respond("Two", previous_response_id=first["id"])).json
        url = f"/v1/responses/{second['id']}/input_items"
        page = (await client.get(url + "?order=asc")).json
        kinds = [(item["type"], item.get("role")) for item in page["data"]]
        assert kinds == [
            ("message", "user"), ("reasoning", None), ("message", "assistant"), ("message", "user"),
        ]  # fmt: skip
        assert page["data"][0]["content"] == [{"type": "input_text", "text": "One"}]
        assert page["data"][1:3] == first["output"]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        latest = (await client.get(url + "?limit=1&limit=3")).json
        assert (latest["data"], latest["has_more"]) == (page["data"][:0:-1], True)
        rest = (await client.get(f"{url}?limit=3&after={latest['last_id']}")).json
        assert (rest["data"], rest["has_more"]) == (page["data"][:1], False)
        assert not (await client.get(f"{url}?limit=4")).json["has_more"]


async def test_input_items_are_returned_as_sent() -> None:
    written = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    given: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "content": [written], "phase": "commentary"},
        {"type": "function_call", "call_id": "a", "name": "f", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "custom_tool_call", "call_id": "b", "name": "p", "namespace": "agents", "input": "***"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
    ]
    async with frontend(ANSWER) as client:
        made = (await client.respond([item | {"status": "odd"} for item in given[:6]] + given[6:])).json
        shown = (await client.get(f"/v1/responses/{made['id']}/input_items?order=asc")).json["data"]
        assert [{name: item[name] for name in sent} for item, sent in zip(shown, given, strict=True)] == given
        assert {item["status"] for item in shown} == {"completed"}
        prefixes = [item["id"].partition("_")[0] for item in shown]
        assert prefixes == ["msg", "msg", "fc", "fco", "ctc", "ctco", "item", "item"]


@pytest.mark.parametrize(
    ("fields", "path", "param"),
    [
        *[({}, f"/input_items?limit={limit}", "limit") for limit in ("0", "x", "5.5", "9" * 5000, "101")],
        ({}, "/input_items?order=up", "order"),
        ({}, "/input_items?after=msg_no", "after"),
        ({}, "?stream=true", "stream"),
        ({"background": True}, "?stream=true", "stream"),
        ({"stream": True}, "?stream=true", "stream"),
        ({}, "?stream=maybe", "stream"),
        ({}, "?stream=true&starting_after=-2", "starting_after"),
    ],
)
async def test_an_invalid_query_is_a_400(fields: dict[str, Any], path: str, param: str) -> None:
    async with frontend(ANSWER) as client:
        made = await client.respond(**fields)
        made_id = made.events[0]["response"]["id"] if made.events else made.json["id"]
        reply = await client.get(f"/v1/responses/{made_id}{path}")
        assert (reply.status, reply.error["param"]) == (400, param)


@settings(max_examples=40, deadline=None)
@given(
    st.text(max_size=8),
    st.lists(
        st.tuples(st.sampled_from(["stream", "starting_after", "limit", "order", "after", "x"]), st.text())
    ),
)
async def test_any_id_and_query_is_served_or_refused(name: str, fields: list[tuple[str, str]]) -> None:
    async with frontend(ANSWER) as client:
        made = (await client.respond(stream=True)).events[0]["response"]["id"]
        query = urlencode(fields) + "&x=1" * (101 if len(fields) > 5 else 0)
        for path in (made, f"{made}/input_items", quote(name)):
            assert (await client.get(f"/v1/responses/{path}?{query}")).status in {200, 400, 404, 405}


async def test_a_reference_to_a_stored_item_is_resolved() -> None:
    async with frontend(ANSWER) as client:
        made = (await client.respond([{"role": "user", "content": "One", "id": "msg_one"}])).json
        thought, answer = ({"id": item["id"]} for item in made["output"])
        reference = answer | {"type": "item_reference"}
        await client.respond([reference, thought, {"id": "msg_one"}, {"role": "user", "content": "x"}])
        assert client.prompt.endswith("assistantfinalHelloassistantanalysisThink.userOneuserxassistant")


async def test_a_background_response_is_answered_at_once_and_made_without_its_client() -> None:
    async with frontend(ANSWER, script={"pause_at": 13}) as client:
        made = (await client.respond(background=True, metadata={"a": "b"})).json
        assert (made["status"], made["background"], made["output"]) == ("in_progress", True, [])
        await client.tokens.paused.wait()
        url = f"/v1/responses/{made['id']}"
        halfway = (await client.get(url)).json
        assert [halfway["status"], halfway["output"][0]["status"]] == ["in_progress"] * 2
        early = await client.respond(previous_response_id=made["id"])
        assert (early.status, early.error["param"]) == (400, "previous_response_id")
        assert early.error["code"] == "invalid_request"  # so there is one
        client.tokens.go_on.set()
        done = await ended(client, made["id"])
        assert (done["status"], done["metadata"]) == ("completed", {"a": "b"})
        assert done["output"][1]["content"][0]["text"] == "Hello"
        status = {"route": "background", "model": MODEL, "status": "200"}
        assert client.metric("baton_requests_total", **status) == 1
        for name in ("time_to_first_token", "inter_token_latency"):
            assert client.metric(f"baton_{name}_seconds_count", route="background", model=MODEL) > 0
        num_tokens = done["usage"]["output_tokens"]
        assert client.metric("baton_completion_tokens_total", model=MODEL) == num_tokens


async def test_cancelling_ends_a_background_response_and_its_generation() -> None:
    async with frontend(ANSWER, script={"pause_at": 13}) as client:
        made = (await client.respond(background=True, stream=False)).json
        await client.tokens.paused.wait()
        url = f"/v1/responses/{made['id']}"
        cancelled = (await client.post(url + "/cancel", {})).json
        item = cancelled["output"][0]
        assert [cancelled["status"], item["status"]] == ["cancelled", "incomplete"]
        assert item["content"][0]["text"] == "Think"
        assert client.tokens.num_ended == 1
        assert (await client.post(url + "/cancel", {})).json == cancelled
        assert (await client.get(url)).json == cancelled


@pytest.mark.parametrize("background", [False, True])
async def test_a_client_that_leaves_ends_a_foreground_stream_only(background: bool) -> None:
    async with frontend(ANSWER, script={"pause_at": 13}) as client:
        ids: list[str] = []
        client.on_write = lambda data: ids.append(data.partition(b'"id":"')[2].partition(b'"')[0].decode())
        pending = asyncio.create_task(client.respond(stream=True, background=background))
        await client.tokens.paused.wait()
        client.gone.set_result(None)
        await pending
        del client.gone
        client.tokens.go_on.set()
        if background:
            assert (await ended(client, ids[0]))["status"] == "completed"
        else:
            assert (await client.get(f"/v1/responses/{ids[0]}")).status == 404
        assert client.tokens.num_ended == 1


async def test_a_stream_is_resumed_after_any_of_its_events() -> None:
    async with frontend(ANSWER) as client:
        streamed = await client.respond(stream=True, background=True)
        url = f"/v1/responses/{streamed.events[0]['response']['id']}?stream=true"
        for true, false in (("true", "false"), ("True", "False"), ("1", "0")):
            assert (await client.get(url.replace("true", true))).body == streamed.body
            assert (await client.get(url.replace("true", false))).json["object"] == "response"
        for number in range(len(streamed.events)):
            resumed = await client.get(f"{url}&starting_after={number}")
            assert resumed.headers["content-type"].startswith("text/event-stream")
            assert resumed.events == streamed.events[number + 1 :]


async def test_every_follower_of_a_run_gets_its_end() -> None:
    async with frontend(ANSWER, script={"pause_at": 13}) as client:
        ids: list[bytes] = []
        client.on_write = lambda data: ids.extend(re.findall(rb'"id":"(resp_\w+)"', data))
        streams = [asyncio.create_task(client.respond(background=True, stream=True))]
        await client.tokens.paused.wait()
        url = f"/v1/responses/{ids[0].decode()}"
        streams += [asyncio.create_task(client.get(f"{url}?stream=true")) for _ in range(3)]
        await asyncio.sleep(0)  # they follow now
        cancelled = (await client.post(f"{url}/cancel", {})).json
        replies = await asyncio.gather(*streams)
        assert [reply.events[-1]["response"] for reply in replies] == [cancelled] * 4
        assert {reply.body for reply in replies} == {replies[0].body}


async def test_a_shutdown_reports_what_it_interrupts_as_failed(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite3"
    async with frontend(ANSWER, path=path, script={"pause_at": 13}) as client:
        made = (await client.respond(background=True)).json
        await client.tokens.paused.wait()
    assert client.metric("baton_requests_total", route="background", model=MODEL, status="503") == 1
    async with frontend(ANSWER, path=path) as client:
        found = (await client.get(f"/v1/responses/{made['id']}")).json
        assert [found["status"], found["output"][0]["status"]] == ["failed", "incomplete"]
        assert "shut down" in found["error"]["message"]
        [failed] = (await client.get(f"/v1/responses/{made['id']}?stream=true&starting_after=7")).events
        assert (failed["type"], failed["sequence_number"]) == ("response.failed", 8)
        assert failed["response"] == found


async def test_a_run_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_RUNS", 2)
    async with frontend(ANSWER, script={"pause_at": 0}) as client:
        made = (await client.respond(background=True)).json
        together = await asyncio.gather(*(client.respond(background=True) for _ in range(2)))
        assert {reply.status for reply in together} == {200, 429}
        one_more = await client.respond(background=True)
        assert (one_more.status, one_more.error["code"]) == (429, "overloaded")
        assert one_more.headers["retry-after"] == "5"
        assert (await client.post(f"/v1/responses/{made['id']}/cancel", {})).status == 200
        assert (await client.respond(background=True)).status == 200


@jumping
async def test_a_run_and_its_stream_fail_at_its_deadline() -> None:
    client = Client(ScriptedTokens(ANSWER, pause_at=5), request_timeout_s=600.0)
    streamed = await client.respond(background=True, stream=True)
    assert streamed.events[-1]["type"] == "response.failed"
    assert now_s() == pytest.approx(600.0)
    failed = await ended(client, streamed.events[0]["response"]["id"])
    assert failed["error"]["code"] == "server_error"
    assert "deadline" in failed["error"]["message"]
    assert client.tokens.num_ended == 1
    labels = {"route": "background", "model": MODEL}
    assert client.metric("baton_requests_total", **labels, status="504") == 1
    assert client.metric("baton_running_requests", route="background") == 0
    await client.responses.close()


async def test_a_stream_that_is_too_long_is_not_stored_and_cannot_be_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "MAX_STREAM_BYTES", 3000)
    async with frontend(ANSWER) as client:
        streamed = await client.respond(background=True, stream=True)
        last = streamed.events[-1]
        assert (last["type"], last["sequence_number"]) == ("response.completed", len(streamed.events) - 1)
        late = await client.get(f"/v1/responses/{last['response']['id']}?stream=true")
        assert (late.status, late.error["param"]) == (400, "stream")


EVENTS = b'event: a\ndata: {"sequence_number":4}\n\n'


@asynccontextmanager
async def beside(call_run: CallRun | None, path: Path) -> AsyncIterator[tuple[Client, ResponseStore]]:
    """A frontend, and the store of another process that runs the response `theirs`."""
    theirs = ResponseStore(str(path / "responses.sqlite3"), address="unix:@theirs")
    await theirs.save(response("theirs", status="in_progress", is_background=True), [])
    state = ResponseState(ResponseStore(theirs.path), call_run=call_run)
    yield Client(ScriptedTokens(), responses=state), theirs
    await state.close()
    await theirs.close()


async def test_a_response_of_an_unreachable_frontend_is_not_continued_cancelled_or_deleted(
    tmp_path: Path,
) -> None:
    url = "/v1/responses/theirs"
    async with beside(None, tmp_path) as (client, _):
        continued = await client.respond(previous_response_id="theirs")
        assert (continued.status, continued.error["param"]) == (400, "previous_response_id")
        refused = [
            await client.get(f"{url}?stream=true"),
            await client.post(f"{url}/cancel", {}),
            await client.delete(url),
        ]
        assert [(reply.status, reply.error["code"]) for reply in refused] == [(503, "not_ready")] * 3
        assert (await client.get(url)).status == 200


@pytest.mark.parametrize("query", ["stream=true", "cancel"])
@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_run_of_another_process_that_has_just_ended_is_read_from_the_store(
    query: str, is_stored: bool, tmp_path: Path
) -> None:
    async def call_run(_: str, response_id: str, number: int | None) -> AsyncGenerator[bytes, None]:
        status = "completed" if query == "stream=true" else "cancelled"
        assert number == (-1 if query == "stream=true" else None)
        body = b'{"status":"%b"}' % status.encode()
        last = response(response_id, status=status, body=body, events=EVENTS, is_background=True)
        if is_stored:
            await theirs.save(last, [])
        for nothing in list[bytes]():
            yield nothing

    async with beside(call_run, tmp_path) as (client, theirs):
        if query == "cancel":
            reply = await client.post("/v1/responses/theirs/cancel", {})
            assert reply.body == b'{"status":"cancelled"}' or not is_stored
        else:
            reply = await client.get(f"/v1/responses/theirs?{query}")
            assert reply.body == EVENTS or not is_stored
        assert reply.status == (200 if is_stored else 503)


async def test_a_stream_whose_process_is_lost_ends_with_a_numbered_error(tmp_path: Path) -> None:
    async def call_run(_: str, response_id: str, number: int | None) -> AsyncGenerator[bytes, None]:
        yield b""
        yield EVENTS * 2
        raise NotReady("Gone.")

    async with beside(call_run, tmp_path) as (client, _):
        reply = await client.get("/v1/responses/theirs?stream=true&starting_after=3")
        *_, last = reply.events
        assert (last["type"], last["sequence_number"], last["code"]) == ("error", 6, "not_ready")
