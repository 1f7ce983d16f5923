"""The compute thread's model: its context, its pool's size, its threads, and what is warm at the start."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.messages import Sampling
from tests.tiny_gpt_oss import CONTEXT_LENGTH, prompt
from workers.engines.embedded.runner import Runner
from workers.engines.embedded.scheduler import Scheduler, Sequence
from workers.engines.embedded.settings import EmbeddedSettings, KvCacheSettings

TOKEN_BYTES = 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, head dim, float32


def runner(checkpoint: Path, max_tokens: int | None = 1024, **options: Any) -> Runner:
    pool = KvCacheSettings(tokens_per_block=8, max_tokens=max_tokens)
    return Runner(EmbeddedSettings(kv_cache_config=pool, **options), checkpoint, stage_on_device=False)


@pytest.mark.parametrize(
    ("max_seq_len", "max_tokens", "context_length"),
    [
        (None, 1024, CONTEXT_LENGTH),
        (100, 1024, 100),
        (CONTEXT_LENGTH + 1, 1024, CONTEXT_LENGTH),
        (None, 71, 64),
        (50, 64, 50),
    ],
)
def test_the_context_is_what_the_settings_the_model_and_the_pool_allow(
    checkpoint: Path, max_seq_len: int | None, max_tokens: int, context_length: int
) -> None:
    assert runner(checkpoint, max_tokens, max_seq_len=max_seq_len).context_length == context_length


def test_a_pool_without_a_size_has_a_gib_of_blocks(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engines.embedded.runner._CPU_POOL_BYTES", 20 * TOKEN_BYTES)
    assert runner(checkpoint, None).pool.num_blocks == 2
    monkeypatch.setattr("workers.engines.embedded.runner._CPU_POOL_BYTES", 7 * TOKEN_BYTES)
    with pytest.raises(ValueError, match=f"7 tokens, less than one block of 8 .{8 * TOKEN_BYTES} bytes"):
        runner(checkpoint, None)


def test_the_model_uses_its_threads_and_has_run_once_before_any_request(checkpoint: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        started = thread.submit(runner, checkpoint, num_threads=2).result()
        assert thread.submit(torch.get_num_threads).result() == 2
    keys, _ = started.pool.read(0, torch.tensor([0]), 1)
    assert keys[:, :, :5].any(dim=-1).all(), "a prompt of four tokens, and one step more"
    assert not keys[:, :, 5:].any()


def test_a_long_prompt_is_scored_piece_by_piece(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scored(num_at_once: int) -> Sequence:
        monkeypatch.setattr("workers.engines.embedded.runner._ROWS_AT_ONCE", num_at_once)
        settings = EmbeddedSettings(
            max_batch_size=1, max_num_tokens=25, kv_cache_config=KvCacheSettings(tokens_per_block=8)
        )
        scheduler = Scheduler(settings, num_blocks=8, context_length=64, vocab_size=256)
        sampling = Sampling(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=1)
        sequence = Sequence(prompt(40), 40, sampling, 41)
        scheduler.add(sequence)
        while works := scheduler.plan().work:
            for work, tokens in zip(works, model.step(works), strict=True):
                scheduler.advance(work, [token.token_id for token in tokens])
        return sequence

    model = runner(checkpoint)
    whole, in_pieces = scored(256).prompt_logprobs, scored(7).prompt_logprobs
    assert [entry.token_id for entry in whole] == prompt(40)[1:]
    assert [entry.token_id for entry in in_pieces] == prompt(40)[1:]
    for one, other in zip(whole, in_pieces, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
