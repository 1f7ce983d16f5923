"""The embedded engine with transceivers that hang, fail or lie, and with a failing compute thread."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from baton.errors import DeadlineExceeded, HandoffFailed, WorkerLost
from baton.messages import GenerateRequest, Guided, KvHandoff
from tests.clock import jumping
from tests.embedded import new_engine, started
from tests.engine_calls import ask, handed_over, next_handoff, tokens
from tests.memory_wire import Wire
from tests.waiting import PATIENCE_S, until
from workers.engines.embedded.engine import EmbeddedEngine


@contextlib.asynccontextmanager
async def handed(checkpoint: Path, wire: Wire, **options: Any) -> AsyncIterator[KvHandoff]:
    """The handoff of a prefill engine that keeps running meanwhile."""
    async with started(checkpoint, wire, **options) as prefill:
        async with handed_over(prefill, ask()) as handoff:
            yield handoff
        await until(lambda: wire.offers == {})


async def answer(each: EmbeddedEngine, request: GenerateRequest) -> list[int]:
    return await tokens(each.decode(request))


async def test_a_pull_that_hangs_is_cancelled_with_its_request(checkpoint: Path) -> None:
    wire = Wire()
    async with handed(checkpoint, wire) as handoff, started(checkpoint, wire) as decode:
        wire.hold.clear()
        task = asyncio.create_task(answer(decode, ask(handoff=handoff)))
        await until(lambda: wire.num_pulls == 1)
        assert decode.stats().kv_used_blocks > 0
        task.cancel()
        await asyncio.wait([task])
        assert decode.stats().kv_used_blocks == 0


async def test_a_handoff_that_expires_in_the_queue_is_not_pulled(checkpoint: Path) -> None:
    wire = Wire()
    async with (
        handed(checkpoint, wire) as handoff,
        started(checkpoint, wire, max_batch_size=1) as decode,
        contextlib.aclosing(decode.decode(ask(max_tokens=400))) as busy,
    ):
        await anext(busy)
        short = msgspec.structs.replace(handoff, ttl_s=0.05)
        with pytest.raises(HandoffFailed, match="in the queue"):
            await answer(decode, ask(handoff=short))
        assert wire.num_pulls == 0


async def test_the_same_buffers_serve_one_handoff_after_the_other(checkpoint: Path) -> None:
    wire = Wire()
    async with started(checkpoint, wire) as prefill, started(checkpoint, wire) as decode:
        for _ in range(3):
            async with contextlib.aclosing(prefill.prefill(ask())) as replies:
                handoff = await next_handoff(replies)
                assert len(await answer(decode, ask(handoff=handoff))) == 12
                assert await anext(replies, None) is None
            assert prefill.stats().kv_pinned_blocks == 0
    assert len(wire.addresses) == 2  # one at either end


async def test_a_first_token_that_the_model_does_not_have_fails_its_handoff(checkpoint: Path) -> None:
    wire = Wire()
    async with handed(checkpoint, wire) as handoff, started(checkpoint, wire) as decode:
        for first_token in (-1, 1 << 20):
            with pytest.raises(HandoffFailed, match="vocabulary"):
                await answer(decode, ask(handoff=msgspec.structs.replace(handoff, first_token=first_token)))


async def test_a_worker_without_a_wire_hands_nothing_over_and_takes_nothing(checkpoint: Path) -> None:
    wire = Wire()
    async with handed(checkpoint, wire) as handoff:
        alone = new_engine(checkpoint, None)
        await alone.start()
        with pytest.raises(HandoffFailed, match="cache_transceiver_config"):
            await answer(alone, ask(handoff=handoff))
        with pytest.raises(HandoffFailed, match="cache_transceiver_config"):
            await anext(alone.prefill(ask()))
        assert await answer(alone, ask())
        await alone.stop()


async def test_an_exception_in_a_step_fails_all_that_runs_and_the_engine(checkpoint: Path) -> None:
    async with started(checkpoint, Wire()) as decode:
        failed = asyncio.create_task(decode.failed())
        running = asyncio.create_task(answer(decode, ask(max_tokens=400)))
        await until(lambda: decode.stats().num_generated_tokens > 2)
        assert not failed.done()
        no_float = 10**400  # no transceiver could deliver it; torch cannot hold it
        with pytest.raises(WorkerLost, match="Overflow"):
            await answer(decode, ask(logit_bias={1: no_float}))
        with pytest.raises(WorkerLost, match="Overflow"):
            await running
        with pytest.raises(WorkerLost, match="Overflow"):
            await answer(decode, ask())
        async with asyncio.timeout(PATIENCE_S):
            assert "Overflow" in await failed


class CompilingSlowly:
    """Takes three seconds to compile the empty form, and five minutes for others."""

    async def matcher(self, form: Guided, _: object) -> None:
        await asyncio.sleep(3 if form == Guided(leading=(), last=()) else 300)  # the clock jumps

    def close(self) -> None: ...


@pytest.mark.parametrize("damage", ["no file", "a file cut short", "no such weight", "a smaller weight"])
async def test_a_checkpoint_that_is_not_whole_fails_the_start(
    checkpoint: Path, damage: str, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head = weights.pop("lm_head.weight")
    if damage == "a smaller weight":
        weights["lm_head.weight"] = head[1:].clone()
    file.unlink()
    if damage != "no file":
        save_file(weights, file, metadata={"format": "pt"})
    if damage == "a file cut short":
        os.truncate(file, file.stat().st_size - 100)
    lost = new_engine(tmp_path, None)
    with pytest.raises((OSError, ValueError), match=tmp_path.name):
        await lost.start()
    await lost.stop()


@pytest.mark.parametrize("is_quick", [True, False])
@jumping
async def test_the_deadline_counts_from_before_the_form_is_compiled(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_quick: bool
) -> None:
    wire = Wire()
    prefill, decode = new_engine(checkpoint, wire), new_engine(checkpoint, wire)
    await prefill.start()
    await decode.start()
    monkeypatch.setattr(decode, "_grammars", CompilingSlowly())
    form = Guided(leading=(), last=(), leads_once=not is_quick)
    async with handed_over(prefill, ask()) as handoff:
        wire.hold.clear()  # the pull hangs
        request = ask(handoff=handoff, deadline_s=5, guided=form)
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await answer(decode, request)
        assert asyncio.get_running_loop().time() - begun_s == pytest.approx(5, abs=0.5)
        assert wire.num_pulls == is_quick
    await decode.stop()
    await prefill.stop()
