"""The trtllm engine over TensorRT-LLM's double, ready for tests."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from baton.messages import GenerateRequest, Sampling
from tests.tiny_gpt_oss import prompt
from tests.waiting import scaled
from workers.engines.trtllm.engine import TrtllmEngine
from workers.engines.trtllm.library import load_library
from workers.engines.trtllm.settings import load_trtllm_settings

KV_TIMEOUT_S = scaled(0.5)
CONFIG: dict[str, Any] = {
    "max_batch_size": 8,
    "max_num_tokens": 64,
    "enable_chunked_prefill": True,
    "disable_overlap_scheduler": True,
    "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 4096},
    "cache_transceiver_config": {
        "backend": "UCX",
        "max_tokens_in_buffer": 256,
        "kv_transfer_timeout_ms": round(KV_TIMEOUT_S * 1000),
    },
}


def new_engine(checkpoint: Path, **config: Any) -> TrtllmEngine:
    lib = load_library()
    override = json.dumps(CONFIG | config)
    loaded = load_trtllm_settings(lib.args, "decode", override=override, typed={"model": str(checkpoint)})
    return TrtllmEngine(loaded, lib, model_path=checkpoint, worker_id="w", incarnation="1", leave=no_exit)


def no_exit(status: int) -> None:
    """Stands in for the end of the process."""


@asynccontextmanager
async def started(checkpoint: Path, **config: Any) -> AsyncGenerator[TrtllmEngine, None]:
    engine = new_engine(checkpoint, **config)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


def ask(num_tokens: int = 40, **sampling: Any) -> GenerateRequest:
    options = {"max_tokens": 12, "seed": 0, "temperature": 0.0} | sampling
    return GenerateRequest(
        request_id="r", model="m", token_ids=prompt(num_tokens), deadline_s=9, sampling=Sampling(**options)
    )
