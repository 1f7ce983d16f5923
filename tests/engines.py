"""The engines that run here, for the contracts that hold each of them."""

import asyncio
import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from baton.messages import Role
from tests import trtllm_engine, vllm_engine
from tests.tiny_gpt_oss import CONTEXT_LENGTH
from tests.waiting import PATIENCE_S, until
from workers.engine import Engine
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.settings import CacheTransceiverSettings, EmbeddedSettings, KvCacheSettings
from workers.engines.library.adapter import Adapter
from workers.engines.library.engine import LibraryEngine
from workers.engines.library.model_facts import ModelFacts, read_model_facts
from workers.engines.mocker import MockerEngine, MockerSettings
from workers.kv.transceiver import CacheTransceiver

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a test's engine; its chunks must be shorter than its longest prompt."""

    max_batch_size: int = 8
    max_queue_size: int = 64
    ttl_s: float = 30.0


Build = Callable[[Role, Limits], Engine]


def _embedded(checkpoint: Path, *, speculates: bool = False) -> Build:
    def build(role: Role, limits: Limits) -> Engine:
        settings = EmbeddedSettings(
            max_batch_size=limits.max_batch_size,
            max_num_tokens=32,
            max_queue_size=limits.max_queue_size,
            speculate="lookup" if speculates and role is Role.DECODE else None,
            kv_cache_config=KvCacheSettings(tokens_per_block=8, max_tokens=4096),
            cache_transceiver_config=CacheTransceiverSettings(
                kv_transfer_timeout_ms=round(limits.ttl_s * 1000)
            ),
        )
        return EmbeddedEngine(
            settings, model_path=checkpoint, role=role, transceiver=CacheTransceiver("127.0.0.1")
        )

    return build


def _mocker(_: Path) -> Build:
    def build(role: Role, limits: Limits) -> Engine:
        settings = MockerSettings(
            prefill_tokens_per_s=20_000,
            decode_step_ms=1,
            max_batch_size=limits.max_batch_size,
            max_queue_size=limits.max_queue_size,
            max_seq_len=CONTEXT_LENGTH,
            handoff_ttl_s=limits.ttl_s,
        )
        return MockerEngine(
            settings, model_path=Path("models/demo"), transceiver=CacheTransceiver("127.0.0.1")
        )

    return build


def library_engine(adapter: Callable[[ModelFacts], Adapter], checkpoint: Path, role: Role) -> Engine:
    model = read_model_facts(checkpoint)
    return LibraryEngine(adapter(model), model)


def _trtllm(checkpoint: Path) -> Build:
    """TensorRT-LLM's double, which runs the model with the embedded engine."""

    def build(role: Role, limits: Limits) -> Engine:
        return trtllm_engine.new_engine(
            checkpoint,
            mode=role.value,
            max_batch_size=limits.max_batch_size,
            max_queue_size=limits.max_queue_size,
            max_num_tokens=32,
            cache_transceiver_config={
                "backend": "UCX",
                "max_tokens_in_buffer": CONTEXT_LENGTH,
                "kv_transfer_timeout_ms": round(limits.ttl_s * 1000),
            },
        )

    return build


def _vllm(checkpoint: Path) -> Build:
    """vLLM's double, which runs the model with the embedded engine."""

    def build(role: Role, limits: Limits) -> Engine:
        return vllm_engine.new_engine(
            checkpoint,
            role.value,
            max_num_seqs=limits.max_batch_size,
            max_queue_size=limits.max_queue_size,
            max_num_batched_tokens=32,
            kv_transfer_config={"kv_connector_extra_config": {"kv_lease_duration": limits.ttl_s}},
        )

    return build


ENGINES: dict[str, Callable[[Path], Build]] = {
    "embedded": _embedded,
    "guessing": functools.partial(_embedded, speculates=True),
    "mocker": _mocker,
    "trtllm": _trtllm,
    "vllm": _vllm,
}


@asynccontextmanager
async def running(*engines: Engine) -> AsyncIterator[list[Engine]]:
    """These, which must hold nothing at the end of the test."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.stop)
            await engine.start()
        yield list(engines)
        for engine in engines:
            await until_idle(engine)


async def until_idle(engine: Engine) -> None:
    """Wait until nothing runs, waits, is held or pinned."""

    def idle() -> bool:
        stats = engine.stats()
        held = (stats.num_running, stats.num_waiting, stats.kv_used_blocks, stats.kv_pinned_blocks)
        return not any(held)

    await until(idle)


async def chunks(answer: AsyncGenerator[T, None]) -> list[T]:
    async with asyncio.timeout(PATIENCE_S), aclosing(answer):
        return [chunk async for chunk in answer]
