"""The paged forward pass against transformers', on a random tiny gpt-oss: whole, chunked, batched."""

from pathlib import Path

import pytest
import torch
from transformers import GptOssForCausalLM

from tests.tiny_gpt_oss import VOCAB_SIZE, WINDOW, prompt, write_mxfp4_checkpoint
from workers.engines.embedded.attention import Span, plan_attention
from workers.engines.embedded.pool import KvPool
from workers.engines.embedded.runner import GptOss

CPU = torch.device("cpu")
TOLERANCE = 1e-4
TOKENS_PER_BLOCK = 8


class Paged:
    """The model under test over a pool; block tables are dealt from one shuffled list of blocks."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = GptOss(checkpoint, dtype=torch.float32, device=CPU)
        self.pool = KvPool(
            self.model.kv_shape,
            num_blocks=96,
            tokens_per_block=TOKENS_PER_BLOCK,
            dtype=torch.float32,
            device=CPU,
        )
        self._deck = torch.randperm(96, generator=torch.Generator().manual_seed(1)).tolist()

    def table(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._deck.pop() for _ in range(-(-num_tokens // TOKENS_PER_BLOCK)))

    @torch.inference_mode()
    def run(self, *pieces: tuple[Span, list[int]]) -> list[torch.Tensor]:
        """The logits [tokens, vocab] of each piece: its span, and the token ids of its whole sequence."""
        spans = [span for span, _ in pieces]
        paged = plan_attention(spans, self.pool, set(self.pool.shape.windows))
        token_ids = [id_ for span, ids in pieces for id_ in ids[span.start : span.start + span.num_tokens]]
        positions = [span.start + i for span in spans for i in range(span.num_tokens)]
        logits = self.model.logits(
            self.model.forward(token_ids, positions, paged), list(range(len(token_ids)))
        )
        return list(torch.split(logits, [span.num_tokens for span in spans]))

    def run_in_chunks(self, ids: list[int], chunk: int) -> torch.Tensor:
        blocks = self.table(len(ids))
        starts = range(0, len(ids), chunk)
        spans = [Span(start, min(chunk, len(ids) - start), blocks) for start in starts]
        return torch.cat([self.run((span, ids))[0] for span in spans])


@pytest.fixture
def paged(checkpoint: Path) -> Paged:
    return Paged(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> GptOssForCausalLM:
    return GptOssForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


@torch.inference_mode()
def expected(reference: GptOssForCausalLM, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize(
    ("num_tokens", "chunk"),
    [
        *((n, n) for n in (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 150)),
        *((100, n) for n in (1, 7, TOKENS_PER_BLOCK, WINDOW, 64)),
    ],
)
def test_a_prompt_has_the_logits_of_transformers_whole_and_in_chunks(
    paged: Paged, reference: GptOssForCausalLM, num_tokens: int, chunk: int
) -> None:
    ids = prompt(num_tokens)
    logits = paged.run_in_chunks(ids, chunk)
    assert logits.shape == (num_tokens, VOCAB_SIZE)
    torch.testing.assert_close(logits, expected(reference, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("num_scores", [1, 5000])
def test_tiles_of_any_size_change_nothing(
    paged: Paged, reference: GptOssForCausalLM, num_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engines.embedded.attention._TILE_SCORES", {"cpu": num_scores})
    ids = prompt(60)
    torch.testing.assert_close(paged.run_in_chunks(ids, 45), expected(reference, ids), atol=TOLERANCE, rtol=0)


def test_decodes_and_prompts_in_one_step_do_not_see_each_other(
    paged: Paged, reference: GptOssForCausalLM
) -> None:
    sequences = [prompt(length, seed=length) for length in (5, 90, 33, 60, 20)]
    tables = [paged.table(len(ids)) for ids in sequences]
    lengths = [len(ids) for ids in sequences]
    # The first three decode their last token; the other two are prompts, one of them in its second chunk.
    for ids, table in zip(sequences[:3], tables[:3], strict=True):
        paged.run((Span(0, len(ids) - 1, table), ids))
    paged.run((Span(0, 31, tables[3]), sequences[3]))
    firsts = [length - 1 for length in lengths[:3]] + [31, 0]
    spans = [
        Span(first, length - first, table)
        for first, length, table in zip(firsts, lengths, tables, strict=True)
    ]
    logits = paged.run(*zip(spans, sequences, strict=True))
    for first, ids, got in zip(firsts, sequences, logits, strict=True):
        torch.testing.assert_close(got, expected(reference, ids)[first:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("num_tokens", "num_held"),
    [*((n, 0) for n in (3, WINDOW - 1, WINDOW)), *((70, n) for n in (0, 1, 37, 60, 69))],
)
def test_gathered_kv_is_all_that_decode_needs_and_its_end_what_a_later_turn_lacks(
    paged: Paged, reference: GptOssForCausalLM, num_tokens: int, num_held: int
) -> None:
    ids = prompt(num_tokens + 1)
    source, target = paged.table(len(ids)), paged.table(len(ids))
    paged.run((Span(0, num_tokens, source), ids))
    if num_held:
        paged.run((Span(0, num_held, target), ids))
    buffer = torch.empty(paged.pool.num_handoff_bytes(num_tokens), dtype=torch.uint8)
    paged.pool.gather(source, num_tokens, buffer)
    end = buffer[-paged.pool.num_handoff_bytes(num_tokens - num_held) :]
    paged.pool.scatter(end, target, num_held, num_tokens)
    (logits,) = paged.run((Span(num_tokens, 1, target), ids))
    torch.testing.assert_close(logits[0], expected(reference, ids)[-1], atol=TOLERANCE, rtol=0)


def test_an_mxfp4_checkpoint_is_the_model_that_it_encodes(tmp_path: Path) -> None:
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    write_mxfp4_checkpoint(packed, plain)
    ids = prompt(30)
    torch.testing.assert_close(
        Paged(packed).run_in_chunks(ids, 30), Paged(plain).run_in_chunks(ids, 30), atol=0, rtol=0
    )
