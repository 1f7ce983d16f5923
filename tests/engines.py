"""The engines that run here, for the contracts that hold each of them."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from baton.messages import Role
from tests import embedded, trtllm_engine, vllm_engine
from tests.tiny_gpt_oss import CONTEXT_LENGTH
from workers.engine import Engine
from workers.engines.embedded.settings import CacheTransceiverSettings
from workers.engines.mocker import MockerEngine, MockerSettings
from workers.kv.transceiver import CacheTransceiver


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a test's engine; its chunks must be shorter than its longest prompt."""

    max_batch_size: int = 8
    max_queue_size: int = 64
    ttl_s: float = 30.0


Build = Callable[[Role, Limits], Engine]


def _embedded(checkpoint: Path, role: Role, limits: Limits, *, speculates: bool = False) -> Engine:
    return embedded.new_engine(
        checkpoint,
        CacheTransceiver("127.0.0.1"),
        max_batch_size=limits.max_batch_size,
        max_num_tokens=32,
        max_queue_size=limits.max_queue_size,
        max_tokens=4096,
        speculate="lookup" if speculates and role is Role.DECODE else None,
        cache_transceiver_config=CacheTransceiverSettings(kv_transfer_timeout_ms=round(limits.ttl_s * 1000)),
    )


def _mocker(_: Path, __: Role, limits: Limits) -> Engine:
    settings = MockerSettings(
        prefill_tokens_per_s=20_000,
        decode_step_ms=1,
        max_batch_size=limits.max_batch_size,
        max_queue_size=limits.max_queue_size,
        max_seq_len=CONTEXT_LENGTH,
        handoff_ttl_s=limits.ttl_s,
    )
    return MockerEngine(settings, model_path=Path("models/demo"), transceiver=CacheTransceiver("127.0.0.1"))


def _trtllm(checkpoint: Path, role: Role, limits: Limits) -> Engine:
    """TensorRT-LLM's double, which runs the model with the embedded engine."""
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


def _vllm(checkpoint: Path, role: Role, limits: Limits) -> Engine:
    """vLLM's double, which runs the model with the embedded engine."""
    return vllm_engine.new_engine(
        checkpoint,
        role.value,
        max_num_seqs=limits.max_batch_size,
        max_queue_size=limits.max_queue_size,
        max_num_batched_tokens=32,
        kv_transfer_config={"kv_connector_extra_config": {"kv_lease_duration": limits.ttl_s}},
    )


ENGINES: dict[str, Callable[[Path, Role, Limits], Engine]] = {
    "embedded": _embedded,
    "guessing": functools.partial(_embedded, speculates=True),
    "mocker": _mocker,
    "trtllm": _trtllm,
    "vllm": _vllm,
}
