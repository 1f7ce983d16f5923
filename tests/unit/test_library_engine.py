"""The library engine over a scripted library: how calls end, are counted, and are finished when abandoned."""

import asyncio
from collections.abc import Awaitable, Callable, Set
from contextlib import aclosing
from typing import Any

import pydantic
import pytest
from msgspec.structs import replace

from baton.errors import BatonError, DeadlineExceeded, HandoffFailed, NotReady, NotResumable, WorkerLost
from baton.messages import GenerateRequest, Guided, KvLayout, TokenChunk, WorkerStats, after_handoff
from tests.clock import jumping, now_s
from tests.engine_calls import next_handoff, tokens
from tests.planes import a_request
from workers.engine import EngineInfo
from workers.engines.library.adapter import Call
from workers.engines.library.engine import LibraryEngine
from workers.engines.library.model_facts import ModelFacts
from workers.settings import Loaded

MODEL = ModelFacts(
    vocab_size=1000, context_length=500, eos_token_id=1, num_layers=1, num_kv_heads=1, head_dim=1,
    kv_dtype="float32", control_ids={},
)  # fmt: skip
LAYOUT = KvLayout(dtype="float32", tokens_per_block=2, num_layers=1, num_kv_heads=1, head_dim=1)
KEEP_S = 60.0


class Scripted:
    """What the library holds of a call, which yields these steps, waits at None, and raises errors."""

    def __init__(self, call: Call, steps: list[Any]) -> None:
        self.call = call
        self.num_aborts = 0
        self.may_go_on = asyncio.Event()
        self.steps = steps


class Library:
    """An adapter of a library that answers with `steps`."""

    label, version, model = "Library", "1", MODEL

    def __init__(self, *steps: Any, may_abort: bool = True) -> None:
        self.answers: list[Scripted] = []
        self.stops: list[bool] = []
        self.fail_pulls: Callable[[], None] = lambda: None
        self.refusal: Exception | None = None
        self.first: Callable[[], Awaitable[object]] | None = None
        self.loaded = Loaded[dict[str, Any]](
            {"model": "m"}, {"max_batch_size": (1, "engine.yaml")}, {"max_batch_size": 1}
        )
        self.death: asyncio.Future[str] = asyncio.Future()
        self.steps = steps
        self._may_abort = may_abort

    def load(self, on_failed_pull: Callable[[], None]) -> None:
        self.fail_pulls = on_failed_pull
        if self.refusal is not None:
            raise self.refusal

    async def start(self) -> tuple[EngineInfo, float, int]:
        if self.first is not None:
            await self.first()
        info = EngineInfo(
            engine="library", engine_version="1", context_length=500, kv_layout=LAYOUT, kv_transfer="wire",
            max_batch_size=8, max_queue_size=0,
        )  # fmt: skip
        return info, KEEP_S, 640

    def submit(self, call: Call) -> None:
        call.result = Scripted(call, list(self.steps))
        self.answers.append(call.result)

    async def step(self, call: Call) -> TokenChunk:
        step = call.result.steps.pop(0) if call.result.steps else None
        if step is None:
            await call.result.may_go_on.wait()
            step = 7
        if isinstance(step, Exception):
            raise step
        if call.hands_over:
            call.kept, call.num_kept_blocks, call.is_continued = {"id": 5}, 2, True
        if step == "":
            return call.chunk([], None, 1)
        is_last = not call.hands_over and call.num_new_tokens + 1 == call.max_tokens
        return call.chunk([step], "length" if is_last else None, 1)

    async def abort(self, call: Call) -> bool:
        if call.error is None and call.transfer is not None and not call.has_answered:
            return self._may_abort
        call.result.num_aborts += 1
        return True

    def failure(self, error: Exception, _: Call) -> BatonError:
        return WorkerLost(str(error))

    def figures(self, calls: Set[Call]) -> WorkerStats:
        return WorkerStats(num_running=len(calls))

    async def died(self) -> str:
        return await self.death

    async def stop(self, *, is_broken: bool) -> None:
        self.stops.append(is_broken)


async def started(library: Library) -> LibraryEngine:
    engine = LibraryEngine(library)
    await engine.start()
    return engine


def ask(**changes: Any) -> GenerateRequest:
    """A request for 3 tokens after 3."""
    request = replace(a_request(), handoff=None, cache_salt="", token_ids=[1, 2, 3])
    sampling = replace(request.sampling, max_tokens=3)
    return replace(request, **{"sampling": sampling} | changes)


async def handed_over(**changes: Any) -> GenerateRequest:
    """A request with another worker's handoff."""
    async with aclosing((await started(Library(4))).prefill(ask())) as replies:
        return after_handoff(ask(**changes), await next_handoff(replies))


async def test_the_rest_of_an_answer_with_a_form_is_refused() -> None:
    engine = await started(Library(4, 5, 6))
    guided = replace(ask().sampling, guided=Guided(last=()))
    assert await tokens(engine.decode(ask(sampling=guided)))
    with pytest.raises(NotResumable):
        await tokens(engine.decode(ask(sampling=guided, num_generated=1)))


async def test_a_broken_library_is_stopped_as_one() -> None:
    library = Library(OSError("a rank died"))
    engine = await started(library)
    with pytest.raises(WorkerLost, match="a rank died"):
        await tokens(engine.decode(ask()))
    await engine.stop()
    assert library.stops == [True]


class Args(pydantic.BaseModel):
    max_batch_size: int = 1


def invalid() -> Exception:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  pydantic's
        Args.model_validate({"max_batch_size": "many"})
    return caught.value


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (invalid(), r"^engine\.yaml: max_batch_size: 'many': .*integer"),
        (ValueError("tp_size and ep_size do not fit"), "^Library refuses the settings: tp_size and ep_size"),
        (RuntimeError("CUDA out of memory"), "^Library did not start: RuntimeError: CUDA out of memory$"),
    ],
)
async def test_a_failed_load_is_one_line_with_its_place(refusal: Exception, says: str) -> None:
    library = Library()
    library.refusal = refusal
    engine = LibraryEngine(library)
    with pytest.raises(NotReady):
        await tokens(engine.decode(ask()))
    with pytest.raises(ValueError, match=says) as failed:
        await engine.start()
    assert "\n" not in str(failed.value)


@jumping
async def test_a_first_request_that_hangs_or_fails_is_a_failed_start() -> None:
    async def fails() -> None:
        raise RuntimeError("no kernel for this GPU")

    for first, says in ((asyncio.Event().wait, "TimeoutError"), (fails, "no kernel for this GPU")):
        library = Library()
        library.first = first
        engine = LibraryEngine(library)
        with pytest.raises(ValueError, match=says):
            await engine.start()
        assert says in await engine.failed()
    assert 60 <= now_s() <= 600


async def test_a_transfer_that_the_library_ends_breaks_nothing() -> None:
    engine = await started(Library(DeadlineExceeded(), DeadlineExceeded(), may_abort=False))
    for asked, kind in ((await handed_over(), HandoffFailed), (ask(), DeadlineExceeded)):
        with pytest.raises(kind):
            await tokens(engine.decode(asked))
        while engine.stats().num_running:
            await asyncio.sleep(0)  # poll: the engine does not notify


@pytest.mark.parametrize(("steps", "kind"), [([None], HandoffFailed), ([4, None], DeadlineExceeded)])
@jumping
async def test_kv_that_expires_before_decode_begins_is_not_used(steps: list[Any], kind: type) -> None:
    asked, began_s = await handed_over(deadline_s=5), now_s()
    assert asked.handoff is not None
    asked = replace(asked, handoff=replace(asked.handoff, ttl_s=2))
    with pytest.raises(kind):
        await tokens((await started(Library(*steps))).decode(asked))
    assert now_s() - began_s == pytest.approx(2 if kind is HandoffFailed else 5, abs=0.1)


@jumping
async def test_a_transfer_that_does_not_end_breaks_the_engine_after_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    due = asyncio.timeout_at
    monkeypatch.setattr(asyncio, "timeout_at", lambda when: due(when - 4e-4))  # uvloop's may be early
    engine = await started(Library(None, may_abort=False))
    with pytest.raises(DeadlineExceeded):
        await tokens(engine.decode(await handed_over(deadline_s=1)))
    failed = asyncio.create_task(engine.failed())
    await asyncio.sleep(KEEP_S + 590)  # in the clock of the test
    assert not failed.done()
    await asyncio.sleep(60)
    assert "did not end" in await failed
    assert engine.stats().num_running == 0


async def test_a_failed_transfer_ends_requests_that_may_have_found_what_it_left() -> None:
    library = Library(4)
    engine = await started(library)
    async with aclosing(engine.decode(ask())) as answered:
        await anext(answered)
        library.steps = (None,)
        both = ask(), await handed_over()
        waiting = [asyncio.create_task(tokens(engine.decode(asked))) for asked in both]
        await asyncio.sleep(0)  # both wait now
        library.fail_pulls()
        for task in waiting:
            with pytest.raises(HandoffFailed):
                await task
        library.answers[0].may_go_on.set()
        assert (await anext(answered)).token_ids == (7,)
    library.steps = (4, 5, 6)
    for salt in ("", "own"):
        await tokens(engine.decode(ask(cache_salt=salt)))
    salts = {answer.call.cache_salt for answer in library.answers}
    library.fail_pulls()
    await tokens(engine.decode(ask()))
    assert library.answers[-1].call.cache_salt not in salts | {"own"}
    assert len(salts) == 3  # none, and both after the first failure


async def test_a_librarys_own_timeout_is_no_deadline() -> None:
    async def broken() -> None:
        raise TimeoutError("the library's")

    call = Call(id="r", request=ask(), max_tokens=3, deadline=0, cache_salt="", num_lacking=lambda: 3)
    with pytest.raises(TimeoutError, match="the library's"):
        await call.wait(broken(), now_s() + 60)
