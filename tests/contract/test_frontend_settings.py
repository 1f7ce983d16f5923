"""What a frontend's flags do in its process, and what several processes of one frontend share."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from baton.errors import DeadlineExceeded, WorkerLost
from baton.messages import GenerateRequest, Reply, TokenChunk, Usage
from frontend.http.keys import line_of
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.thoughts import Seal
from tests.scripted_workers import answer, failing, hand_off
from tests.serving_frontend import DEMO, MODEL, Held, Workers, saying, serving
from tests.waiting import PATIENCE_S

THOUGHT = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
ASKED = [{"role": "user", "content": "Hi"}]
PAGE = "https://app.example"


async def test_requests_wait_for_a_lost_worker_as_long_as_the_flag_says() -> None:
    workers = Workers(d1=failing(WorkerLost("gone")))
    async with serving(workers, wait_for_worker_s=PATIENCE_S) as frontend:
        asking = asyncio.create_task(frontend.complete())
        while not (await frontend.get("/health")).json()["lost"]:
            pass
        workers.join("d2", answer)
        assert (await asking).status_code == 200


async def test_a_request_has_the_deadline_of_the_flag() -> None:
    async with serving(Workers(d1=Held()), request_timeout_s=0.1) as frontend:
        reply = await frontend.complete()
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_origins_are_those_of_the_flag() -> None:
    async with serving(Workers(d1=answer), cors_origin=PAGE) as frontend:
        read = await frontend.http.get("/live", headers={"origin": PAGE})
        assert read.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({}, 403),
        ({"allowed_host": "own.example, *.other.example"}, 403),
        ({"allowed_host": "a.example"}, 200),
    ],
)
async def test_without_keys_only_names_of_the_flag_are_served(settings: dict[str, str], status: int) -> None:
    async with serving(Workers(d1=answer), **settings) as frontend:
        for host, expected in (("a.example", status), ("127.0.0.1", 200)):
            assert (await frontend.http.get("/v1/models", headers={"host": host})).status_code == expected


@pytest.mark.parametrize(("path", "status"), [("/v1/models", 200), ("/live", 200), ("/fleet", 403)])
async def test_with_keys_other_names_get_all_but_the_page(path: str, status: int, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line_of("one", "k1"))
    keys.chmod(0o600)
    async with serving(Workers(d1=answer), api_keys_file=keys) as frontend:
        headers = {"host": "a.example", "x-api-key": "k1"}
        assert (await frontend.http.get(path, headers=headers)).status_code == status


async def test_a_viewer_gets_a_snapshot_a_second_until_the_frontend_drains() -> None:
    async with serving(Workers(d1=answer)) as frontend:
        accepts = {"accept": "text/event-stream"}
        async with frontend.http.stream("GET", "/fleet", headers=accepts) as watched:
            assert watched.headers["content-type"].startswith("text/event-stream")
            lines = watched.aiter_lines()
            shown = await anext(lines)
            ending = asyncio.create_task(frontend.end())
            async for _ in lines:  # it ends
                pass
        assert await ending == 0
    assert json.loads(shown.removeprefix("data: "))["workers"][0]["worker_id"] == "d1"


async def test_processes_share_the_memory_for_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.__main__.default_bytes", lambda: 200_000)
    async with serving(Workers(d1=answer), num_processes=2) as frontend:
        ending = asyncio.Event()

        async def unfinished() -> AsyncGenerator[bytes, None]:
            yield b"a" * 90_000
            await ending.wait()

        holding = asyncio.create_task(frontend.http.post("/v1/completions", content=unfinished()))
        while (asked := await frontend.complete(prompt="a" * 200_000)).status_code != 503:
            await asyncio.sleep(0.01)  # poll: the other body has not arrived
        assert asked.headers["retry-after"] == "1"
        assert asked.json()["error"]["code"] == "bodies_full"
        assert (await frontend.complete(prompt="a" * 60_000)).status_code == 400
        ending.set()
        assert (await holding).status_code == 400


async def test_the_model_has_the_names_and_the_date_of_the_flags() -> None:
    workers = Workers(d1=answer)
    async with serving(workers, model_alias=f"gpt-*={MODEL}", current_date="2026-01-02") as frontend:
        await frontend.post("/v1/chat/completions", messages=ASKED, model="gpt-9")
        (_, request), *_ = workers.calls
        assert "2026-01-02" in ModelTokenizer.load(DEMO).decode(request.token_ids)


@pytest.mark.parametrize(
    ("after_s", "asked"), [(0.0, ["d1"]), (PATIENCE_S, ["p1", "d1"])], ids=["always", "if prefill is busy"]
)
async def test_short_prompts_skip_prefill_as_the_flags_say(after_s: float, asked: list[str]) -> None:
    workers = Workers(p1=hand_off, d1=answer)
    flags: dict[str, Any] = {"local_prefill_tokens": 50, "local_prefill_after_s": after_s}
    async with serving(workers, **flags) as frontend:
        assert (await frontend.complete()).status_code == 200
        assert workers.called == asked


async def stuck(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
    await asyncio.sleep(asked.deadline_s)
    if asked.deadline_s:
        raise DeadlineExceeded
    yield TokenChunk(())


async def test_a_worker_without_progress_is_tried_after_the_time_of_the_flag() -> None:
    workers = Workers(d1=stuck)
    workers.answering.add("d1")
    async with serving(workers, no_progress_s=0.05, drain_timeout_s=0.0) as frontend:
        asking = asyncio.create_task(frontend.complete())
        async with asyncio.timeout(PATIENCE_S / 3):  # by default it would be tried later
            while not (await frontend.get("/health")).json()["stuck"]:
                await asyncio.sleep(0.01)  # poll, like a client
        assert await frontend.end() == 0
        await asking


async def test_reasoning_is_sealed_with_the_key_of_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    said = saying(THOUGHT + "<|channel|>final<|message|>Hello<|return|>")
    async with serving(Workers(d1=said), seal_key_file=path) as frontend:
        reply = await frontend.respond(include=["reasoning.encrypted_content"], max_output_tokens=100)
        assert Seal(b"k" * 32).open(reply.json()["output"][0]["encrypted_content"], "x") == "Think."


async def test_each_process_sends_workers_its_part_of_what_they_hold() -> None:
    held = Held()
    workers = Workers(d1=held)
    workers.max_batch_size = 2
    workers.answering.add("d1")  # /metrics asks it for its statistics
    async with serving(workers, num_processes=2) as frontend:
        asking = [asyncio.create_task(frontend.complete()) for _ in range(2)]
        while "baton_queued_requests 1.0" not in (await frontend.get("/metrics")).text:
            assert len(workers.calls) < 2
        held.goes_on.set()
        assert [(await each).status_code for each in asking] == [200, 200]


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, {"alice/", "alice/x", "bob/x"}), ({"share_cache": True}, {"", "x"})]
)
async def test_cached_kv_is_a_keys_own_unless_keys_share_it(
    settings: dict[str, Any], expected: set[str], tmp_path: Path
) -> None:
    salts = set()

    async def script(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        salts.add(asked.cache_salt)
        yield TokenChunk((10,), "length", Usage(2, 0, 1))

    keys = tmp_path / "keys"
    keys.write_text("\n".join(line_of(name, name) for name in ("alice", "bob")))
    async with serving(Workers(d1=script), api_keys_file=keys, **settings) as frontend:
        for name, fields in (("alice", {}), ("alice", {"cache_salt": "x"}), ("bob", {"cache_salt": "x"})):
            reply = await frontend.complete(name, max_tokens=1, **fields)
            assert reply.status_code == 200, reply.text
        assert salts == expected
