"""`GET /requests` and `baton why` against a frontend: running requests, shared ids, bad input."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from baton.messages import GenerateRequest, Reply, TokenChunk
from operations.commands import main
from tests.serving_frontend import MODEL, Held, Workers, saying, serving

pytestmark = pytest.mark.loops("uvloop")


async def test_a_request_that_runs_is_shown_with_its_stage_and_what_it_waits_for() -> None:
    held = Held()
    async with serving(Workers(d=held)) as frontend:
        asked = asyncio.ensure_future(frontend.complete())
        await held.began.wait()
        (found,) = (await frontend.get("/requests?running=1")).json()["requests"]
        record = found["record"]
        assert (record["status"], record["now"], record["num_completion_tokens"]) == (0, "stream", 1)
        assert (record["num_prompt_tokens"], record["legs"][0]["gap_at"]) == (1, 1)  # since the first token
        held.goes_on.set()
        await asked
        assert (await frontend.get("/requests?running=1")).json()["requests"] == []


async def test_a_deadline_names_the_worker_that_did_not_answer() -> None:
    async def silent(_: GenerateRequest) -> AsyncGenerator[Reply, None]:
        await asyncio.Event().wait()
        yield TokenChunk((0,))

    async with serving(Workers(d=silent), request_timeout_s=1.0) as frontend:
        assert (await frontend.complete()).status_code == 504
        (found,) = (await frontend.get("/requests?failed=9")).json()["requests"]
        assert found["record"]["code"] == "deadline_exceeded"
        verdict = found["verdict"]
        assert [verdict[each] for each in ("stage", "worker", "cause")] == [
            "decode_wait",
            "d",
            "d did not answer",
        ]


async def test_who_follows_a_background_response_does_not_wait_for_its_prompt() -> None:
    held = Held()
    async with serving(Workers(d=held)) as frontend:
        body = {"model": MODEL, "input": "Hi", "background": True, "stream": True}
        asked = asyncio.ensure_future(frontend.http.post("/v1/responses", json=body))
        await held.began.wait()
        found = (await frontend.get("/requests?running=1")).json()["requests"]
        assert [each["record"]["now"] for each in found] == ["stream", "stream"]
        held.goes_on.set()
        await asked


async def test_requests_that_share_an_id_are_all_shown(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(Workers(d=saying("<|channel|>final<|message|>Hi<|return|>"))) as frontend:
        for _ in range(3):
            reply = await frontend.http.post(
                "/v1/completions", json={"model": MODEL, "prompt": "Hi"}, headers={"x-request-id": "same"}
            )
            assert reply.status_code == 200
        url = str(frontend.http.base_url)
        assert await asyncio.to_thread(main, ["why", "same", "--url", url]) == 0
        assert capsys.readouterr().out.count("same  200  ") == 3


BAD = ["", "id=a&id=b", "slowest=0", "slowest=101", "failed=x", "running=2", "slowest=%C2%B2", "nope=1"]


async def test_a_bad_query_is_one_sentence() -> None:
    async with serving(Workers(d=Held())) as frontend:
        for query in (*BAD, "failed=", "slowest=000000001" + 5000 * "9"):
            reply = await frontend.get(f"/requests?{query}")
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request"), query


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["unknown"], 1),
        (["\x1b[2J" + "x" * 5000], 1),
        (["caf\u00e9 \U0001f600 %2F&slowest=1"], 1),
        (["--failed"], 1),
        ([], 2),
        (["id", "--slowest", "3"], 2),
        (["--slowest", "0"], 2),
        (["--running", "--log", "x"], 2),
        (["id", "--log", "/"], 2),
        (["id", "--log", "README.md"], 1),
        (["id", "--url", "http://127.0.0.1:1"], 2),
    ],
)
async def test_bad_input_of_the_command_is_one_sentence(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str]) -> Any:
        try:
            return main(["why", *argv])
        except SystemExit as ended:
            return ended.code

    async with serving(Workers(d=Held())) as frontend:
        url = [] if "--url" in argv else ["--url", str(frontend.http.base_url)]
        assert await asyncio.to_thread(run, [*argv, *url]) == status
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err[:-1].isprintable()
