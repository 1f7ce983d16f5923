"""Runs in the background: how many there may be, how long they may take, and what is left of them."""

import asyncio

import pytest

from baton.errors import NotReady
from frontend.response_runs import MAX_RUNS
from frontend.response_store import RUNNING
from tests.clock import run_jumping
from tests.scripted_frontend import MODEL, Client, ScriptedTokens, ended, frontend

ANSWER = "<|channel|>final<|message|>Hello<|return|>"


def test_one_response_more_than_the_limit_is_told_to_come_back() -> None:
    async def scenario() -> None:
        async with frontend(ANSWER, script={"pause_at": 0}) as client:
            made = (await client.respond(background=True)).json
            runs = client.services.responses.runs._runs  # noqa: SLF001  a thousand real ones take seconds
            others = [f"other {i}" for i in range(MAX_RUNS - 2)]
            runs |= dict.fromkeys(others, runs[made["id"]])
            assert (await client.respond(background=True)).status == 200
            one_more = await client.respond(background=True)
            assert (one_more.status, one_more.error["code"]) == (429, "overloaded")
            assert one_more.headers["retry-after"] == "5"
            assert (await client.post(f"/v1/responses/{made['id']}/cancel", {})).status == 200
            assert (await client.respond(background=True)).status == 200
            for other in others:
                del runs[other]

    assert MAX_RUNS == 1000
    asyncio.run(scenario())


def test_a_run_ends_when_its_time_is_over_and_says_so() -> None:
    async def scenario() -> None:
        client = Client(ScriptedTokens(ANSWER, pause_at=5), request_timeout_s=600.0)
        made = (await client.respond(background=True)).json
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        (run,) = client.services.responses.runs._runs.values()  # noqa: SLF001  as its client polls
        await run.task
        assert loop.time() - began_s == pytest.approx(600.0)
        failed = await ended(client, made["id"])
        assert failed["error"]["code"] == "server_error"
        assert "deadline" in failed["error"]["message"]
        assert client.tokens.num_ended == 1
        labels = {"route": "background", "model": MODEL}
        assert client.metric("baton_requests_total", **labels, status="504") == 1
        assert client.metric("baton_running_requests", route="background") == 0
        await client.services.responses.close()

    run_jumping(scenario())


def test_a_run_is_forgotten_when_it_has_ended() -> None:
    async def scenario() -> None:
        async with frontend(ANSWER) as client:
            made = (await client.respond(background=True)).json
            await ended(client, made["id"])
            assert await client.services.responses.runs.get(made["id"]) is None
            assert client.metric("baton_running_requests", route="background") == 0

    asyncio.run(scenario())


def test_a_drain_ends_what_still_runs_when_its_time_is_over() -> None:
    async def scenario() -> None:
        client = Client(ScriptedTokens(ANSWER, pause_at=5))
        made = (await client.respond(background=True)).json
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await client.services.responses.runs.drain(30.0)
        assert loop.time() - began_s == pytest.approx(30.0)
        failed = await ended(client, made["id"])
        assert failed["status"] == "failed"
        assert "shut down" in failed["error"]["message"]
        assert client.tokens.num_ended == 1
        await client.services.responses.close()

    run_jumping(scenario())


def test_every_follower_of_a_run_gets_its_end() -> None:
    async def scenario() -> None:
        async with frontend(ANSWER, script={"pause_at": 5}) as client:
            streams = [asyncio.create_task(client.respond(stream=True, background=True))]
            await client.tokens.paused.wait()
            (run,) = client.services.responses.runs._runs.values()  # noqa: SLF001  its id is not known yet
            url = f"/v1/responses/{run.answer.response.id}?stream=true"
            streams += [asyncio.create_task(client.get(url)) for _ in range(3)]
            await asyncio.sleep(0)  # they follow now
            await run.stop(NotReady("Enough."))
            last = [reply.events[-1] for reply in await asyncio.gather(*streams)]
            assert [event["type"] for event in last] == ["response.failed"] * 4
            assert {event["response"]["error"]["message"] for event in last} == {"Enough."}
            assert run.answer.response.status != RUNNING

    asyncio.run(scenario())
