"""What an engine scores: equal on both roles, close in another precision, far with damaged weights."""

import asyncio
import math
import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import EngineFailure
from baton.messages import GenerateRequest, Role, Scores, TokenChunk, TokenLogprob
from baton.number_check import PROMPTS, TOLERANCE, difference
from tests.unit.test_worker import ScriptedEngine
from workers.engine import EngineInfo
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.settings import EmbeddedSettings
from workers.kv.transceiver import choose_transceiver
from workers.scoring import score

DEMO = Path(__file__).parents[2] / "models" / "demo"
Weights = dict[str, torch.Tensor]


async def scored(folder: Path, role: Role = Role.DECODE, **settings: Any) -> Scores:
    engine = EmbeddedEngine(
        EmbeddedSettings(**settings), model_path=folder, transceiver=choose_transceiver("TCP")
    )
    try:
        found = await score(engine, role, await engine.start())
    finally:
        await engine.stop()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def right() -> Scores:
    return asyncio.run(scored(DEMO))


async def test_a_prefill_worker_scores_as_a_decode_worker_does(right: Scores) -> None:
    assert len(right.likeliest) == len(PROMPTS)
    assert difference(right, await scored(DEMO, Role.PREFILL, max_num_tokens=64)) < 0.001


async def test_a_bfloat16_twin_is_within_the_tolerance(right: Scores) -> None:
    assert 0 < difference(right, await scored(DEMO, dtype="bfloat16")) < TOLERANCE / 2


def zero_an_expert_of_each_layer(weights: Weights) -> None:
    """One of four."""
    for name in weights:
        if name.endswith("experts.down_proj"):
            weights[name][0] = 0


def round_to_5_bits(weights: Weights) -> None:
    for name, tensor in weights.items():
        if tensor.dim() > 1:
            groups = tensor.float().reshape(-1, 32)
            step = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 15
            weights[name] = ((groups / step).round() * step).reshape(tensor.shape).to(tensor.dtype)


@pytest.mark.parametrize(
    "damage", [zero_an_expert_of_each_layer, pytest.param(round_to_5_bits, marks=pytest.mark.slow)]
)
async def test_damaged_weights_are_beyond_the_tolerance(
    damage: Callable[[Weights], None], right: Scores, tmp_path: Path
) -> None:
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    weights = load_file(DEMO / "model.safetensors")
    damage(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert difference(right, await scored(tmp_path)) > TOLERANCE


class LogprobEngine(ScriptedEngine):
    """Each prompt's first token has this log probability, or the prompt fails."""

    def __init__(self, logprob: float | None) -> None:
        super().__init__()
        self.logprob = logprob

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if self.logprob is None:
            raise EngineFailure("out of memory")
        yield TokenChunk((1,), "length", None, (TokenLogprob(1, self.logprob, ((1, self.logprob),)),))


INFO = EngineInfo(engine="scripted", engine_version="1", context_length=512)


@pytest.mark.parametrize(("logprob", "expected"), [(-0.123456, -0.1235), (-math.inf, -9999.0)])
async def test_logprobs_are_finite_and_short(logprob: float, expected: float) -> None:
    found = await score(LogprobEngine(logprob), Role.DECODE, INFO)
    assert found is not None
    assert set(found.likeliest) == {((1, expected),)}


async def test_a_model_that_computes_no_numbers_does_not_start() -> None:
    with pytest.raises(ValueError, match="not numbers"):
        await score(LogprobEngine(math.nan), Role.DECODE, INFO)


async def test_an_engine_that_cannot_score_starts_unscored() -> None:
    short = EngineInfo(engine="scripted", engine_version="1", context_length=100)
    assert await score(LogprobEngine(None), Role.DECODE, INFO) is None
    assert await score(ScriptedEngine(), Role.PREFILL, INFO) is None
    assert await score(LogprobEngine(-1.0), Role.DECODE, short) is None
