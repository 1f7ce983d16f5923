"""The vllm engine over vLLM's double: what it announces, expects in the cache and counts."""

import asyncio
import signal
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import vllm.v1.engine.core
from vllm.v1.engine.async_llm import AsyncLLM

from baton.messages import KvLayout, after_handoff
from tests.engine_calls import next_handoff, tokens
from tests.tiny_gpt_oss import CONTEXT_LENGTH, write_checkpoint
from tests.vllm_engine import CONFIG, ask, core, new_engine, started
from workers.engine import EngineInfo
from workers.engines.vllm.adapter import KEEP
from workers.engines.vllm.patches import NUM_TOKENS
from workers.engines.vllm.patches.kernels import WARM_UP_LOGPROBS, warm_up_lengths
from workers.flags import DisaggregationMode


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


async def info_of(checkpoint: Path, mode: DisaggregationMode, **config: Any) -> EngineInfo:
    engine = new_engine(checkpoint, mode, **config)
    try:
        return await engine.start()
    finally:
        await engine.stop()


async def test_the_worker_announces_what_it_serves(checkpoint: Path) -> None:
    info = await info_of(checkpoint, "decode", max_queue_size=9)
    assert (info.name, info.context_length) == ("vllm", CONTEXT_LENGTH)
    assert (info.max_batch_size, info.max_queue_size) == (CONFIG["max_num_seqs"], 9)
    assert info.kv_transfer == f"nixl:{quote(str(checkpoint))}"
    assert info.kv_layout == KvLayout(
        dtype="float32",
        tokens_per_block=8,
        num_layers=4,
        num_kv_heads=2,
        head_dim=16,
        tensor_parallel_size=1,
    )
    # Its steps could be longer than its context, which its warm-up must not be.
    other = await info_of(checkpoint, "agg", kv_cache_dtype="fp8", tensor_parallel_size=2, max_model_len=20)
    assert (other.kv_transfer, other.context_length, other.max_queue_size) == ("", 20, 256)
    assert other.kv_layout is not None
    assert (other.kv_layout.dtype, other.kv_layout.tensor_parallel_size) == ("fp8", 2)


@pytest.mark.parametrize(
    ("config", "num_lacking"),
    [
        ({}, 200 - 192),
        ({"num_gpu_blocks_override": 32}, 200 - 128),  # half of the cache: two blocks of the estimate
        ({"enable_prefix_caching": False}, 200),
    ],
    ids=str,
)
async def test_what_was_answered_is_expected_in_the_cache_as_far_as_there_is_room(
    checkpoint: Path, config: dict[str, Any], num_lacking: int
) -> None:
    async with started(checkpoint, "decode", **config) as engine:
        await tokens(engine.decode(ask(200, max_tokens=2)))
        assert engine.num_lacking_tokens(ask(200)) == num_lacking


async def test_a_stopped_engine_leaves_nothing_running(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = asyncio.all_tasks()
    engine = new_engine(checkpoint)
    await engine.start()
    inside = core(engine)
    async with aclosing(engine.prefill(ask())) as replies:
        await next_handoff(replies)
    await asyncio.sleep(0)  # vLLM is asked to release the pin
    asked_at_shutdown: list[bool] = []
    shut_down = AsyncLLM.shutdown

    def noting(llm: AsyncLLM) -> None:
        asked_at_shutdown.append("release-kv" in {task.get_name() for task in asyncio.all_tasks()})
        shut_down(llm)

    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.shutdown", noting)
    await engine.stop()
    assert asked_at_shutdown == [False]
    await asyncio.sleep(0)  # cancelled tasks end
    assert asyncio.all_tasks() == before
    assert not inside._thread.is_alive()  # noqa: SLF001  the double is ours


async def test_it_loads_with_plain_signals_and_warms_up_each_step_size_and_kind(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []
    sampled: list[tuple[int | None, int]] = []
    handlers: list[object] = []
    generate, load = AsyncLLM.generate, AsyncLLM.from_engine_args

    def spying(llm: AsyncLLM, prompt: dict[str, list[int]], params: Any, *args: Any) -> Any:
        prompts.append(prompt["prompt_token_ids"])
        sampled.append((params.logprobs, params.max_tokens))
        return generate(llm, prompt, params, *args)

    def loading(*args: Any, **options: Any) -> Any:
        handlers.append(signal.getsignal(signal.SIGINT))
        return load(*args, **options)

    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.generate", spying)
    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.from_engine_args", loading)
    await info_of(checkpoint, "agg")
    assert handlers == [signal.SIG_DFL]
    sizes = warm_up_lengths(CONFIG["max_num_batched_tokens"])
    assert list(map(len, prompts)) == sizes + [1] * len(WARM_UP_LOGPROBS)
    assert len({prompt[0] for prompt in prompts}) == len(prompts)  # nothing is found in the cache
    assert sampled == [(kind, 2) for kind in [None] * len(sizes) + list(WARM_UP_LOGPROBS)]


async def test_vllm_is_told_how_much_of_the_prompt_is_kept_elsewhere(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    generate, params_of = AsyncLLM.generate, vllm.v1.engine.core.nixl_params

    def counting_its_own_token(*args: Any) -> dict[str, Any]:
        return dict(params_of(*args)) | {NUM_TOKENS: 41}

    def spying(llm: AsyncLLM, prompt: Any, params: Any, *args: Any, **options: Any) -> Any:
        told.append(params.extra_args["kv_transfer_params"])
        return generate(llm, prompt, params, *args, **options)

    async with started(checkpoint) as prefill, started(checkpoint, "decode") as decode:
        monkeypatch.setattr("vllm.v1.engine.core.nixl_params", counting_its_own_token)
        monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.generate", spying)
        async with aclosing(prefill.prefill(ask())) as replies:
            handed = after_handoff(ask(), await next_handoff(replies))
            await tokens(decode.decode(handed))
    assert len(handed.token_ids) == 41  # with prefill's
    assert told[1][NUM_TOKENS] == 40
    assert told[0] == KEEP
