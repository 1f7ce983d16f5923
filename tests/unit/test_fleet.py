"""The live fleet: who can be called, who is missing, who is lost and comes back, who cannot be paired."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BatonError, ModelNotFound, NoWorkers, WorkerLost
from baton.messages import KvLayout, Reply, Request, Role, StatsRequest, WorkerInfo, WorkerStats
from frontend.flags import parse_aliases
from frontend.metrics import Metrics
from frontend.routing.fleet import Fleet, model_of
from frontend.text.tokenizer import ModelTokenizer
from tests import scripted_workers as scripted
from tests.clock import jumping
from tests.generators import none_abandoned
from tests.waiting import until

DEMO = Path(__file__).parents[2] / "models/demo"
LAYOUT = KvLayout(dtype="bfloat16", tokens_per_block=32, num_layers=2, num_kv_heads=2, head_dim=64)


def worker(name: str, **changes: object) -> WorkerInfo:
    endpoint = "dyn://dynamo.prefill.generate" if name.startswith("p") else "dyn://dynamo.backend.generate"
    facts = {"endpoint": endpoint, "model_path": str(DEMO), "engine": "embedded", "kv_layout": LAYOUT}
    return scripted.worker(name, **facts | {"kv_transfer": "ucx (cma)"} | changes)


class Registry(scripted.PlaneDouble):
    """A discovery and a transport in which `dead` workers are lost at once, and `hung` ones do not answer."""

    def __init__(self, *workers: WorkerInfo) -> None:
        self.dead: set[str] = set()
        self.hung: set[str] = set()
        self.num_watching = self.num_calls = 0
        self.error: BatonError = WorkerLost("no answer")
        self._snapshots: asyncio.Queue[tuple[WorkerInfo, ...]] = asyncio.Queue()
        self.show(*workers)

    def show(self, *workers: WorkerInfo) -> None:
        self._snapshots.put_nowait(workers)

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        self.num_watching += 1
        try:
            while True:
                yield await self._snapshots.get()
        finally:
            self.num_watching -= 1

    async def call(self, address: str, request: Request) -> AsyncGenerator[Reply, None]:
        assert isinstance(request, StatsRequest)
        self.num_calls += 1
        if address in self.dead:
            raise self.error
        if address in self.hung:
            await asyncio.Event().wait()
        num_tokens = 0 if address == "p1" else 3  # after a warm-up with a guess
        yield WorkerStats(num_running=3, num_generated_tokens=num_tokens, num_rejected_guesses=1)


@asynccontextmanager
async def fleet_of(*workers: WorkerInfo, **settings: Any) -> AsyncIterator[tuple[Registry, Fleet]]:
    registry = Registry(*workers)
    fleet = Fleet(registry, registry, **settings)
    async with fleet.keep_current():
        yield registry, fleet


def decodes(fleet: Fleet) -> list[str]:
    """The live decode workers."""
    return [w.worker_id for w in fleet.workers("m", Role.DECODE)]


async def test_a_model_is_served_as_soon_as_it_has_a_decode_worker() -> None:
    async with fleet_of() as (registry, fleet):
        with pytest.raises(NoWorkers, match="start prefill and decode workers") as raised:
            fleet.served("m")
        assert raised.value.retry_after_s == 1
        assert fleet.health().missing == ["decode", "prefill"]
        assert fleet.health().unreachable == ["NATS: requests wait for it"]
        registry.is_reachable, registry.problem = True, "gone"
        assert fleet.health().unreachable == ["the registry: new workers get no requests"]

        registry.show(worker("p1"))
        await until(lambda: fleet.health().instances)
        with pytest.raises(NoWorkers, match="No decode worker of 'm' is available"):
            fleet.served("m")
        assert (fleet.health().status, fleet.health().missing) == ("unhealthy", ["m: decode"])

        registry.show(worker("d1", context_length=50), worker("p1"))
        await until(lambda: fleet.models() == ["m"])
        assert (fleet.health().status, fleet.health().missing) == ("healthy", [])
        assert fleet.served("m").context_length == 50
        registry.show(worker("d1", context_length=50), worker("p1", context_length=40))
        await until(lambda: fleet.served("m").context_length == 40)
        assert fleet.health().doubts == ["m: 40 tokens of context on p1, 50 on d1; 40 are served"]
        seen = await fleet.look()
        assert [seen.status, *(each.tokens_per_step for each in seen.instances)] == ["healthy", 1.0, None]
        assert [url.split(".")[1] for url in fleet.health().endpoints] == ["backend", "prefill"]
        with pytest.raises(ModelNotFound, match=r"'other' does not exist.* models: m\..*--model-alias"):
            fleet.served("other")


@jumping
async def test_closing_leaves_no_task_and_no_call_behind() -> None:
    alone = asyncio.all_tasks()
    lost = worker("d1")
    registry = Registry(lost)
    fleet = Fleet(registry, registry)
    with none_abandoned():
        async with fleet.keep_current():
            await until(lambda: fleet.models() == ["m"])
            registry.hung.add("d1")
            registry.show(lost, worker("d2"))  # d2 is probed
            await until(lambda: fleet.health().instances[1:])
            registry.hung.add("d3")
            registry.show(lost, worker("d2"), worker("d3"))
            registry.dead.add("d2")
            fleet.table.note(lost, "lost")
            assert await fleet.stats() == []
            fleet.cut.add(worker("p1"), lost)
        assert asyncio.all_tasks() == alone
        assert registry.num_watching == 0


@jumping
async def test_a_tokenizer_that_appears_after_its_worker_is_loaded_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "late"
    late = worker("d1", model="late", model_path=str(folder))
    alone = asyncio.all_tasks()
    async with fleet_of(late) as (registry, fleet):
        await fleet.synced.wait()
        with pytest.raises(NoWorkers, match="tokenizer of 'late' is not loaded yet; retry later") as raised:
            fleet.served("late")
        assert (raised.value.retry_after_s, fleet.health().missing) == (1, ["late: tokenizer"])
        registry.show(late, worker("d2"))
        await until(lambda: fleet.models() == ["m"])
        await asyncio.sleep(10)  # time for several tries
        folder.symlink_to(DEMO)
        await until(lambda: fleet.models() == ["late", "m"])
        assert fleet.served("late").name == "late"
        registry.show(late, worker("d2"), worker("d3", model="none", model_path="/none"))
        await until(lambda: "model=none" in caplog.text)
    assert asyncio.all_tasks() == alone
    assert caplog.text.count("no tokenizer yet model=late") == 1


async def test_a_tokenizer_that_loads_slowly_delays_no_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    load = ModelTokenizer.load

    def loaded(folder: Path) -> ModelTokenizer:
        if folder == Path("/slow"):
            goes_on.wait()
        return load(DEMO)

    monkeypatch.setattr(ModelTokenizer, "load", loaded)
    slow = worker("d1", model="slow", model_path="/slow")
    async with fleet_of(slow) as (registry, fleet):
        try:
            await until(lambda: fleet.health().instances)
            with pytest.raises(NoWorkers, match="tokenizer of 'slow' is not loaded yet; retry later"):
                fleet.served("slow")
            registry.show(slow, worker("d2"))
            await until(lambda: fleet.models() == ["m"])
            registry.show(slow, worker("d2"), worker("d3"))
            await until(lambda: len(decodes(fleet)) == 2)
            assert not fleet.synced.is_set()
        finally:
            goes_on.set()
        await fleet.synced.wait()
        assert fleet.models() == ["m", "slow"]


@pytest.mark.parametrize("given", ["", "2026-02-03"])
async def test_prompts_name_today_or_the_date_given(given: str) -> None:
    before = datetime.now(UTC).date().isoformat()
    async with fleet_of(worker("d1"), current_date=given) as (_, fleet):
        await until(lambda: fleet.models() == ["m"])
        named = fleet.served("m").current_date
    today = {before, datetime.now(UTC).date().isoformat()}  # midnight may have passed
    assert named in ({given} if given else today)


@pytest.mark.parametrize("text", [None, "", "{}"])
async def test_a_broken_tokenizer_costs_its_own_model_only(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    async with fleet_of(worker("d1", model_path=str(tmp_path), model="broken"), worker("d2")) as (_, fleet):
        await until(lambda: fleet.models() == ["m"])


@pytest.mark.parametrize("fault", ["dead", "hung"])
@jumping
async def test_a_worker_that_never_answered_gets_no_request_until_it_does(fault: str) -> None:
    async with fleet_of(worker("d1"), worker("d2")) as (registry, fleet):
        getattr(registry, fault).add("d1")
        await fleet.synced.wait()
        assert decodes(fleet) == ["d2"]
        await until(lambda: fleet.health().lost == ["d1"])
        assert fleet.health().warming == []
        getattr(registry, fault).clear()
        await until(lambda: len(decodes(fleet)) == 2)
        assert fleet.health().lost == []


async def test_a_worker_that_warms_up_gets_no_requests_yet() -> None:
    async with fleet_of(worker("d1", is_ready=False), worker("p1")) as (registry, fleet):
        await until(lambda: fleet.health().warming == ["d1"])
        assert not fleet.models()
        assert not fleet.workers("m", Role.DECODE)
        assert fleet.health().missing == ["m: decode"]
        with pytest.raises(NoWorkers, match="No decode worker of 'm' is ready yet"):
            fleet.served("m")
        registry.show(worker("d1"), worker("p1"))
        await until(lambda: fleet.models() == ["m"])
        assert fleet.health().warming == []


async def test_health_names_pairs_that_are_refused_and_those_that_did_not_warm_up() -> None:
    workers = worker("d1", cold_peers=("p1", "gone")), worker("p1"), worker("p2", engine="x")
    async with fleet_of(*workers) as (_, fleet):
        await until(lambda: fleet.health().instances)
        assert fleet.health().cold_pairs == ["d1 with p1"]
        assert fleet.health().refused_pairs == ["p2 -> d1: engine x is not embedded"]
        assert [w.worker_id for w in fleet.workers("m", Role.PREFILL)] == ["p1"]


BIG, SMALL = "openai/gpt-oss-120b", "openai/gpt-oss-20b"
ALIASES = parse_aliases(
    f"claude-haiku*={SMALL}, claude-*={BIG},fast={SMALL},gone=no/it,gon*={BIG},goner={SMALL},openai/*={SMALL}"
)


@pytest.mark.parametrize(
    ("meant", "names"),
    [
        (BIG, (BIG, "gpt-oss-120b", "claude-opus-4-6")),
        (SMALL, ("claude-haiku-4-5", "fast", "openai/gpt-oss")),
        (None, ("gone", "openai", "Claude-opus-4-6", "FAST", "120b", "gpt-5", "")),
    ],
)
def test_a_name_means_one_model_or_none(meant: str | None, names: tuple[str, ...]) -> None:
    assert {model_of(name, {BIG, SMALL}, ALIASES) for name in names} == {meant}


async def test_the_part_before_the_slash_is_enough_and_plain_aliases_are_listed() -> None:
    assert (model_of("openai", {BIG}, ()), model_of("open", {BIG}, ())) == (BIG, None)
    async with fleet_of(worker("d1", model=SMALL), aliases=ALIASES) as (_, fleet):
        await until(fleet.models)
        assert {name: fleet.served(name).name for name in fleet.models()} == {"fast": SMALL, SMALL: SMALL}


@pytest.mark.parametrize("text", ["claude", "=x", "x=", "a=b,c"])
def test_an_alias_that_names_no_model_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be PATTERN=MODEL"):
        parse_aliases(text)


def test_losses_and_cuts_of_names_that_are_gone_are_counted_but_not_kept() -> None:
    registry, metrics = Registry(), Metrics()
    fleet = Fleet(registry, registry)
    for number in range(2000):
        fleet.events.add("lost", f"d{number}")
        fleet.events.add("cut", f"p{number} -> d{number}")
        if number % 100 == 99:
            fleet.note_workers(metrics)
    assert metrics.total("workers_lost") == metrics.total("pairs_cut") == 2000
    assert not fleet.events.lost
