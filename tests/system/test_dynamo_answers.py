"""Clients get the same answers over Dynamo's runtime as over Baton's own plane, whole and streamed."""

import asyncio
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from frontend.text.tokenizer import ModelTokenizer
from tests.client_requests import harmony_requests, requests, write_script
from tests.dynamo_stack import DynamoStack
from tests.echo import DEMO
from tests.stack import MODEL, Stack, cluster
from tests.waiting import PATIENCE_S

Json = dict[str, Any]
Asked = tuple[str, Json]

_AT_ONCE = 8
_ID = re.compile(
    r"\b(chatcmpl|cmpl|resp|msg|rs|fc|call|toolu|bt1)[-_.][0-9a-f]{8,}(\.[0-9a-f]{32})?"
)  # or signature
_TIMES = {"created", "created_at", "completed_at"}
_OF_EVENTS = {"sequence_number", "obfuscation"}  # they count events, or are random
# How many tokens an event has depends on how fast the reader is.
_GROWING = {"content", "reasoning_content", "reasoning", "arguments"}
_GROWING |= {"text", "delta", "thinking", "partial_json"}


@pytest.fixture(scope="module", params=["tcp", pytest.param("nats", marks=pytest.mark.slow)])
def urls(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    etcd_server: str,
    nats_server: str,
) -> Iterator[tuple[str, str]]:
    """A frontend over Baton's plane and one over Dynamo's runtime, whose workers play the same script."""
    script = tmp_path_factory.mktemp("script") / "script.json"
    write_script(script, ModelTokenizer.load(DEMO))
    flags = ["--script", str(script), "--plane", request.param]
    environ = {"DYN_REQUEST_PLANE": request.param}
    if request.param == "nats":
        flags += ["--registry", "etcd"]
        environ |= cluster(etcd_server, nats_server) | {"BATON_REQUEST_PLANE": "dynamo"}
    with ExitStack() as stacks:
        own = stacks.enter_context(Stack(tmp_path_factory.mktemp("own")))
        dynamo = stacks.enter_context(DynamoStack(tmp_path_factory.mktemp("dynamo"), environ))
        own.frontend()
        own.start("echo", "tests.echo", str(script))
        dynamo.start_fleet("prefill", "decode", flags=tuple(flags))
        own.wait_ready(0, 1)
        yield own.url, dynamo.url


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_every_request_of_the_four_apis_has_the_same_answer(urls: tuple[str, str], is_streamed: bool) -> None:
    check(urls, list(requests()), is_streamed)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_every_case_of_the_harmony_parser_has_the_same_answer(
    urls: tuple[str, str], is_streamed: bool
) -> None:
    check(urls, list(harmony_requests()), is_streamed)


def check(urls: tuple[str, str], asked: list[Asked], is_streamed: bool) -> None:
    """Compare the two frontends' answers."""
    stream = {"stream": True} if is_streamed else {}
    asked = [(path, {"model": MODEL} | body | stream) for path, body in asked]
    own, dynamo = (asyncio.run(answers(url, asked)) for url in urls)
    different = [
        f"{path} {json.dumps(body)}\n  own:    {a}\n  dynamo: {b}"
        for (path, body), a, b in zip(asked, own, dynamo, strict=True)
        if a != b
    ]
    assert not different, f"{len(different)} of {len(asked)} differ:\n" + "\n".join(different[:5])
    assert sum(answer[0] == 200 for answer in own) > len(asked) * 0.8


async def answers(url: str, asked: Iterable[Asked]) -> list[tuple[int, str, str]]:
    """Status, content type and body of each answer, `same` and `joined`."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def ask(path: str, body: Json) -> tuple[int, str, str]:
        async with slots:
            answer = await client.post(path, json=body)
        kind, text = answer.headers["content-type"], answer.text
        found = joined(events(text)) if "event-stream" in kind else same(answer.json())
        return answer.status_code, kind, json.dumps(found, ensure_ascii=False)

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=False) as client:
        return await asyncio.gather(*(ask(path, body) for path, body in asked))


def events(text: str) -> list[Json]:
    """The events of a stream: their names and data."""
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        data = fields.get("data")
        if data is None or fields.get("event") == "ping":
            continue  # keeps the connection alive
        found.append(fields | {"data": same(json.loads(data)) if data.startswith("{") else data})
    return found


def same(value: Any) -> Any:
    """Without ids and times."""
    if isinstance(value, dict):
        return {
            name: "time" if name in _TIMES and each else same(each)
            for name, each in value.items()
            if name not in _OF_EVENTS
        }
    if isinstance(value, list):
        return [same(each) for each in value]
    return _ID.sub(r"\1", value) if isinstance(value, str) else value


def joined(events: list[Json]) -> list[Json]:
    """Choice after choice, with the texts of events in a row that differ in nothing else put together."""
    found: list[Json] = []
    for event in sorted(events, key=_choice):
        more = _join(found[-1], event) if found else None
        if more is None or more == found[-1]:
            found.append(event)
        else:
            found[-1] = more
    return found


def _choice(event: Json) -> int:
    data = event["data"]
    choices = data.get("choices") if isinstance(data, dict) else None
    return choices[0]["index"] if choices else -1 if choices is None and "[DONE]" not in data else 99


def _join(a: Any, b: Any, name: str = "", is_logprobs: bool = False) -> Any:
    """One value for both; None if they cannot be put together."""
    is_logprobs |= name == "logprobs"
    if isinstance(a, str) and isinstance(b, str) and name in _GROWING:
        return a + b
    if isinstance(a, list) and isinstance(b, list) and is_logprobs:
        return a + b
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        parts = {key: _join(a[key], b[key], key, is_logprobs) for key in a}
        return None if any(parts[key] is None and a[key] is not None for key in a) else parts
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        items = [_join(x, y, name, is_logprobs) for x, y in zip(a, b, strict=True)]
        return None if None in items else items
    return a if a == b else None
