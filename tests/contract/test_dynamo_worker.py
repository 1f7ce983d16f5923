"""A worker on Dynamo's runtime, with a caller on the same bindings in the place of Dynamo's frontend."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailure,
    HandoffFailed,
    InvalidRequest,
    Overloaded,
    WorkerLost,
)
from baton.messages import (
    GenerateRequest,
    KvHandoff,
    Reply,
    Request,
    Role,
    Scores,
    StatsRequest,
    TokenChunk,
    WorkerInfo,
    WorkerStats,
)
from baton.transport import Respond
from tests.conftest import free_port
from tests.scripted_workers import worker
from tests.waiting import PATIENCE_S, until
from workers.engines.mocker import MockerEngine, MockerSettings
from workers.engines.requests import check_request
from workers.kv.transceiver import choose_transceiver
from workers.worker import Worker

# The binding reads it when it is imported.
os.environ.setdefault("DYN_LOG", "error")
pytest.importorskip("dynamo.runtime", reason="there is no wheel for this platform")

from dynamo.llm import FpmEventSubscriber
from dynamo.runtime import Client, Context, DistributedRuntime

from baton.dynamo.runtime import start_runtime
from baton.dynamo.worker_endpoint import WorkerEndpoint
from baton.dynamo.worker_messages import PrefillAnswer

MODEL = Path("models/demo").resolve()
PROMPT = list(range(100, 140))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry; all addresses are loopback."""
    environ = {"DYN_FILE_KV": tmp_path, "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_SELF_HOST_METADATA": "0"}
    environ["DYN_TCP_RESPONSE_STREAM_HOST"] = "127.0.0.1"
    for name, value in environ.items():
        monkeypatch.setenv(name, str(value))


def new_runtime() -> DistributedRuntime:
    return DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")


def card_of(role: Role, **fields: Any) -> WorkerInfo:
    """A mocker's."""
    place = {"endpoint": f"dyn://ns.{role.value}.generate", "model_path": str(MODEL), "address": ""}
    known = {"role": role, "engine": "mocker", "kv_transfer": "tcp", "max_batch_size": 8}
    return worker(f"{role.value}-1", **place | known | {"context_length": 1000} | fields)


def with_stats(respond: Respond) -> Respond:
    """`respond`, but for requests for statistics."""

    async def stats() -> AsyncGenerator[Reply, None]:
        yield WorkerStats()

    return lambda request: stats() if isinstance(request, StatsRequest) else respond(request)


@asynccontextmanager
async def served(respond: Respond, card: WorkerInfo) -> AsyncIterator[WorkerEndpoint]:
    """A registered worker."""
    endpoint = WorkerEndpoint(new_runtime(), with_stats(respond))
    try:
        await endpoint.show(msgspec.structs.replace(card, is_ready=False))
        await endpoint.show(card)
        yield endpoint
    finally:
        await endpoint.close()


@asynccontextmanager
async def mocker(role: Role, **settings: float) -> AsyncIterator[MockerEngine]:
    """A registered worker with a mocker."""
    async with (
        bare_mocker(**settings) as engine,
        served(Worker(engine, role, (f"{role.value}-1", "1")).answer, card_of(role)),
    ):
        yield engine


@asynccontextmanager
async def bare_mocker(**settings: float) -> AsyncIterator[MockerEngine]:
    engine = MockerEngine(
        MockerSettings(**{"decode_step_ms": 2.0} | settings),  # type: ignore[arg-type]  # floats only
        model_path=MODEL,
        transceiver=choose_transceiver("TCP"),
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


class Caller:
    """What a router of Dynamo's does with one endpoint."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def chunks(
        self, context: Context | None = None, **body: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        (instance,) = await self.client.wait_for_instances()
        body = {"token_ids": PROMPT, "model": "m"} | body
        async for chunk in await self.client.direct(body, instance, annotated=False, context=context):
            yield chunk

    async def answer(self, **body: Any) -> list[dict[str, Any]]:
        async with asyncio.timeout(PATIENCE_S):
            return [chunk async for chunk in self.chunks(**body)]


@asynccontextmanager
async def caller(*roles: Role) -> AsyncIterator[list[Caller]]:
    runtime = new_runtime()
    try:
        paths = [f"ns.{role.value}.generate" for role in roles]
        yield [Caller(await runtime.endpoint(path).client()) for path in paths]
    finally:
        runtime.shutdown()


def tokens(chunks: list[dict[str, Any]]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk["token_ids"]]


LIMITS = {"max_tokens": 12, "stop_token_ids_hidden": [3071]}


async def test_decode_continues_from_the_kv_of_prefill_as_if_it_had_computed_it() -> None:
    async with (
        mocker(Role.PREFILL) as prefiller,
        mocker(Role.DECODE) as decoder,
        caller(Role.PREFILL, Role.DECODE) as (prefill, decode),
    ):
        alone = await decode.answer(token_ids=[*PROMPT, 1], stop_conditions=LIMITS)
        first = await prefill.answer(stop_conditions=LIMITS | {"max_tokens": 1})
        await until(lambda: prefiller.stats().kv_pinned_blocks == 1)
        params = first[0]["disaggregated_params"]
        chunks = await decode.answer(stop_conditions=LIMITS, prefill_result={"disaggregated_params": params})
        assert [chunk["finish_reason"] for chunk in first] == ["length"]
        assert tokens(chunks)[0] == tokens(first)[0]
        assert (len(tokens(chunks)), len(tokens(alone))) == (12, 12)
        assert chunks[-1]["finish_reason"] == "length"
        usage = chunks[-1]["completion_usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (40, 12, 52)
        assert decoder.stats().kv_moved_bytes > 0
        await until(lambda: prefiller.stats().kv_pinned_blocks == prefiller.stats().num_running == 0)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_decode_goes_on_after_prefills_token_or_draws_it_if_it_is_the_only_one(max_tokens: int) -> None:
    async def respond(request: Request) -> AsyncGenerator[Reply, None]:
        assert isinstance(request, GenerateRequest)
        check_request(request, vocab_size=1000, context_length=1000)
        yield TokenChunk((5,), "length")

    fields: dict[str, Any] = {"ttl_s": 60.0, "engine_state": b"", "first_chunk": TokenChunk((5,))}
    handoff = KvHandoff(first_token=5, num_prompt_tokens=40, **fields)
    params = msgspec.to_builtins(PrefillAnswer(source=card_of(Role.PREFILL), reply=handoff))
    async with served(respond, card_of(Role.DECODE)), caller(Role.DECODE) as (decode,):
        limits, result = {"max_tokens": max_tokens}, {"disaggregated_params": params}
        assert tokens(await decode.answer(stop_conditions=limits, prefill_result=result)) == [5] * max_tokens


async def test_a_handoff_of_another_engine_is_refused_and_decode_serves_on() -> None:
    async with mocker(Role.DECODE), caller(Role.DECODE) as (decode,):
        foreign = {"disaggregated_params": {"kv_transfer_params": {"remote_engine_id": "x"}}}
        with pytest.raises(Exception, match="Unavailable: the handoff is not Baton's"):
            await decode.answer(prefill_result=foreign)
        assert len(tokens(await decode.answer(stop_conditions=LIMITS))) == 12


@pytest.mark.parametrize("role", Role)
async def test_a_health_check_needs_no_peer_and_holds_nothing(role: Role) -> None:
    async with mocker(role) as engine, caller(role) as (worker,):
        body = {"token_ids": [1], "stop_conditions": {"max_tokens": 1}, "_HEALTH_CHECK": True}
        assert len(tokens(await worker.answer(**body))) == 1
        await until(lambda: engine.stats().kv_pinned_blocks == engine.stats().num_running == 0)


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_a_caller_that_stops_or_leaves_frees_the_slot(is_stopped: bool) -> None:
    async with mocker(Role.DECODE, decode_step_ms=500.0) as engine, caller(Role.DECODE) as (decode,):
        context = Context("r1")
        chunks = decode.chunks(context, stop_conditions={"max_tokens": 900})
        await anext(chunks)
        assert engine.stats().num_running == 1
        if is_stopped:
            context.stop_generating()
            assert not [chunk async for chunk in chunks if "finish_reason" in chunk]
        else:
            await chunks.aclose()
        await until(lambda: engine.stats().num_running == 0)


async def test_a_caller_that_leaves_during_prefill_frees_the_slot_and_leaves_no_pin() -> None:
    async with mocker(Role.PREFILL, prefill_tokens_per_s=1.0) as engine, caller(Role.PREFILL) as (prefill,):
        context = Context("r1")
        (instance,) = await prefill.client.wait_for_instances()
        body = {"token_ids": PROMPT, "model": "m"}
        # A stop that comes before the call is open may get lost in the runtime.
        chunks = await prefill.client.direct(body, instance, annotated=False, context=context)
        await until(lambda: engine.stats().num_running == 1)
        context.stop_generating()
        assert not [chunk async for chunk in chunks if "finish_reason" in chunk]
        await until(lambda: engine.stats().num_running == engine.stats().kv_pinned_blocks == 0)


async def test_a_handoff_that_its_caller_does_not_read_leaves_no_pin() -> None:
    freed = asyncio.Event()

    async def respond(_: Request) -> AsyncGenerator[Reply, None]:
        try:
            yield KvHandoff(first_token=5, num_prompt_tokens=40, ttl_s=60.0, engine_state=b"")
            reading.cancel()  # in the turn in which it was put
            await asyncio.Event().wait()
        finally:
            freed.set()

    async with served(respond, card_of(Role.PREFILL)) as endpoint:
        answer = endpoint._answer({"token_ids": PROMPT, "model": "m"}, Context("r1"))  # noqa: SLF001  the runtime's call
        reading = asyncio.ensure_future(anext(answer))
        await until(freed.is_set)


async def test_a_card_has_role_needs_limits_and_batons_own() -> None:
    card = card_of(Role.DECODE, scores=Scores("digest", (((5, -0.5), (6, -1.5)),)))
    async with bare_mocker() as engine, served(Worker(engine, Role.DECODE, ("d", "1")).answer, card):
        runtime = new_runtime()
        cards = FpmEventSubscriber(runtime.endpoint("ns.decode.generate"))
        cards.start_tracking()
        await until(cards.get_model_cards)
        (text,) = cards.get_model_cards().values()
        runtime.shutdown()
        found = json.loads(text)
    assert (found["display_name"], found["worker_type"]) == ("m", "decode")
    assert found["needs"] == [["prefill"], ["decode"]]  # it serves without a prefill worker, too
    config = found["runtime_config"]
    assert (config["context_length"], config["max_num_seqs"]) == (1000, 8)
    assert (config["reasoning_parser"], config["tool_call_parser"]) == ("gpt_oss", "harmony")
    assert msgspec.convert(config["runtime_data"]["baton"], WorkerInfo) == card


async def test_a_withdrawn_worker_is_not_listed_and_finishes_what_runs() -> None:
    card = card_of(Role.DECODE)
    async with (
        bare_mocker() as engine,
        served(Worker(engine, Role.DECODE, ("d", "1")).answer, card) as endpoint,
        caller(Role.DECODE) as (decode,),
    ):
        chunks = decode.chunks(stop_conditions={"max_tokens": 300})
        running = [await anext(chunks)]
        await endpoint.withdraw(msgspec.structs.replace(card, cold_peers=("p",)))  # replaced meanwhile
        assert decode.client.instance_ids()
        await endpoint.withdraw(card)
        await until(lambda: not decode.client.instance_ids())
        running += [chunk async for chunk in chunks]
    assert len(tokens(running)) == 300
    assert running[-1]["finish_reason"] == "length"


async def test_a_runtime_that_ends_by_itself_is_noticed() -> None:
    runtime, lost = new_runtime(), asyncio.Event()
    endpoint = WorkerEndpoint(runtime, with_stats(failing(RuntimeError("unreached"))), lost.set)
    await endpoint.show(card_of(Role.DECODE))
    runtime.shutdown()  # what it does when its lease has expired
    await asyncio.wait_for(lost.wait(), PATIENCE_S)
    assert "runtime ended" in endpoint.loss
    await endpoint.close()


async def test_a_runtime_starts_with_the_members_of_a_cluster_that_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", "")
    member = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    away, here = (f"http://127.0.0.1:{port}" for port in (free_port(), member.sockets[0].getsockname()[1]))
    async with member, asyncio.timeout(PATIENCE_S):
        (await start_runtime("file", "127.0.0.1", {"ETCD_ENDPOINTS": [away, here]}, {})).shutdown()
    assert os.environ["ETCD_ENDPOINTS"] == here


def failing(error: Exception) -> Respond:
    async def respond(_: Request) -> AsyncGenerator[Reply, None]:
        yield TokenChunk((5,))
        raise error

    return respond


@pytest.mark.parametrize(
    ("error", "arrived"),
    [
        (InvalidRequest("no"), "^no$"),
        (DeadlineExceeded("late"), "^DeadlineExceeded: late$"),
        (HandoffFailed("gone"), "^Unavailable: gone$"),
        (Overloaded("full"), "^Unavailable: full$"),
        (WorkerLost("dead"), "^Unavailable: dead$"),
        (EngineFailure("odd"), "^Internal: odd$"),
        (RuntimeError("secret"), "^Internal: the engine failed on request "),
    ],
)
async def test_each_error_has_its_name_in_dynamo(error: BatonError | Exception, arrived: str) -> None:
    async with served(failing(error), card_of(Role.DECODE)), caller(Role.DECODE) as (decode,):
        with pytest.raises(Exception, match=arrived):
            await decode.answer()


@pytest.mark.parametrize("body", [{"token_ids": None}, {"token_ids": [-1]}, {"stop_conditions": 5}])
async def test_a_malformed_request_is_refused_with_the_field(body: dict[str, Any]) -> None:
    async with (
        served(failing(RuntimeError("unreached")), card_of(Role.DECODE)),
        caller(Role.DECODE) as (decode,),
    ):
        with pytest.raises(Exception, match=rf"the request is not served: .* `\$\.{next(iter(body))}"):
            await decode.answer(**body)


async def test_tokens_that_wait_for_a_slow_reader_are_one_chunk() -> None:
    async def respond(_: Request) -> AsyncGenerator[Reply, None]:
        for token_id in range(40):
            yield TokenChunk((token_id,), "stop" if token_id == 39 else None)

    async with served(respond, card_of(Role.DECODE)), caller(Role.DECODE) as (decode,):
        chunks = await decode.answer()
    assert tokens(chunks) == list(range(40))
    assert len(chunks) == 1
