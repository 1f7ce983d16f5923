"""The compute thread's work: owns model and KV pool, runs steps, moves KV in and out of the pool."""

from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AttentionInterface, GptOssConfig, GptOssForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from baton.messages import Sampling
from workers.engines.embedded.attention import PagedBatch, Span, paged_attention, plan_attention
from workers.engines.embedded.ledger import Lease
from workers.engines.embedded.pool import KvPool, KvShape, Staging
from workers.engines.embedded.sampling import Draw, Sampled, sample, token_logprobs
from workers.engines.embedded.scheduler import Sequence, Work
from workers.engines.embedded.settings import EmbeddedSettings, KvCacheSettings
from workers.kv.memory import Memory

_CPU_POOL_BYTES = 1 << 30
# Prompt tokens whose logits are computed at once: 200 MB with gpt-oss's vocabulary.
_ROWS_AT_ONCE = 256


class Runner:
    """The torch side of the engine. Its methods run one at a time, on the compute thread."""

    def __init__(self, settings: EmbeddedSettings, model_path: Path, stage_on_device: bool) -> None:
        # OpenMP keeps this setting per thread.
        torch.set_num_threads(settings.num_threads)
        best = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(best if settings.device == "auto" else settings.device)
        default = "bfloat16" if self._device.type == "cuda" else "float32"
        dtype: torch.dtype = getattr(torch, default if settings.dtype == "auto" else settings.dtype)
        self._model = GptOss(model_path, dtype=dtype, device=self._device)
        self.vocab_size = self._model.vocab_size
        self.pool = self._new_pool(settings.kv_cache_config, dtype)
        self.staging = Staging(self._device, on_device=stage_on_device and self._device.type == "cuda")
        self._windows = set(self.pool.shape.windows)
        # A request must fit into the pool alone, or it could never be admitted.
        self.context_length = min(
            settings.max_seq_len or self._model.context_length,
            self._model.context_length,
            self.pool.num_blocks * self.pool.tokens_per_block,
        )
        if self.context_length < 2:
            raise ValueError(f"a KV pool of {self.context_length} tokens cannot hold a prompt and an answer")
        self._warm_up()

    @torch.inference_mode()
    def step(self, works: list[Work]) -> list[list[Sampled]]:
        """Run all `works`, as a `Step` orders them; returns the tokens of those that sample: the guesses that
        sampling gives, too, and one more."""
        spans = [Span(work.start, len(work.token_ids), work.sequence.lease.blocks) for work in works]
        paged = plan_attention(spans, self.pool, self._windows)
        token_ids = [token_id for work in works for token_id in work.token_ids]
        positions = [work.start + offset for work in works for offset in range(len(work.token_ids))]
        hidden = self._model.forward(token_ids, positions, paged)
        rows: list[int] = []
        drawn: list[Draw] = []
        end = 0
        for work in works:
            self._score(work, hidden, end)
            end += len(work.token_ids)
            if work.samples:
                rows += range(end - 1 - work.num_guessed, end)
                drawn += [Draw(work.sequence, work.guesses[:i]) for i in range(work.num_guessed + 1)]
        chosen = iter(sample(self._model.logits(hidden, rows), drawn) if drawn else [])
        return [
            _accepted(work, [next(chosen) for _ in range(work.num_guessed + 1)]) if work.samples else []
            for work in works
        ]

    def _score(self, work: Work, hidden: torch.Tensor, first_row: int) -> None:
        """Record the log probabilities of the prompt tokens that follow those of `work`, if requested."""
        sequence = work.sequence
        num_top = sequence.sampling.prompt_logprobs
        if num_top is None:
            return
        followed = range(work.start, min(work.start + len(work.token_ids), sequence.num_prompt - 1))
        for start in range(0, len(followed), _ROWS_AT_ONCE):
            positions = followed[start : start + _ROWS_AT_ONCE]
            logits = self._model.logits(hidden, [first_row + at - work.start for at in positions])
            next_ids = [sequence.token_ids[at + 1] for at in positions]
            sequence.prompt_logprobs += token_logprobs(logits, next_ids, num_top)

    @torch.inference_mode()
    def gather(self, sequence: Sequence) -> Memory:
        """Gather the KV of all computed tokens of `sequence` into a contiguous staging buffer."""
        buffer = self.staging.take(self.pool.num_handoff_bytes(sequence.num_computed))
        assert isinstance(buffer.owner, torch.Tensor)
        self.pool.gather(sequence.lease.blocks, sequence.num_computed, buffer.owner)
        return buffer

    @torch.inference_mode()
    def scatter(self, buffer: Memory, sequence: Sequence) -> None:
        """Store what was pulled as the KV of the `sequence.token_ids` that it lacks."""
        num_tokens = len(sequence.token_ids)
        assert isinstance(buffer.owner, torch.Tensor)
        self.pool.scatter(buffer.owner, sequence.lease.blocks, sequence.num_computed, num_tokens)

    def _warm_up(self) -> None:
        """Run one prompt and one decode step in the first blocks, so that requests do not pay for lazy
        initialization."""
        num_tokens = min(4, self.context_length - 1)
        sequence = Sequence([0] * num_tokens, num_tokens, Sampling(max_tokens=2, seed=0), num_tokens + 1)
        sequence.lease = Lease(tuple(range(-(-sequence.num_reserved // self.pool.tokens_per_block))))
        self.step([Work(sequence, 0, sequence.token_ids, samples=True)])
        self.step([Work(sequence, num_tokens, [0], samples=True)])

    def _new_pool(self, settings: KvCacheSettings, dtype: torch.dtype) -> KvPool:
        shape = self._model.kv_shape
        token_bytes = shape.num_token_elements * dtype.itemsize
        wanted = settings.max_tokens
        if self._device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            room = int(free_bytes * settings.free_gpu_memory_fraction) // token_bytes
            num_tokens = room if wanted is None else min(wanted, room)
        else:
            num_tokens = _CPU_POOL_BYTES // token_bytes if wanted is None else wanted
        num_blocks = num_tokens // settings.tokens_per_block
        if num_blocks < 1:
            raise ValueError(
                f"the KV pool has room for {num_tokens} tokens, less than one block of "
                f"{settings.tokens_per_block} ({settings.tokens_per_block * token_bytes} bytes)"
            )
        return KvPool(
            shape,
            num_blocks=num_blocks,
            tokens_per_block=settings.tokens_per_block,
            dtype=dtype,
            device=self._device,
        )


def _accepted(work: Work, sampled: list[Sampled]) -> list[Sampled]:
    """The tokens up to the first that was not guessed: later ones were drawn after a wrong guess."""
    pairs = zip(work.guesses, sampled, strict=False)
    num_right = len(list(takewhile(lambda pair: pair[0] == pair[1].token_id, pairs)))
    return sampled[: num_right + 1]


_ATTENTION = "baton_paged"
# transformers' fastest implementation at every batch size, on CPU too; `eager` loops over experts.
_EXPERTS = "grouped_mm"
_NO_MASK = {"full_attention": None, "sliding_attention": None}  # PagedBatch has the mask

VERSIONS = f"transformers {transformers.__version__}, torch {torch.__version__}"


class GptOss:
    """A gpt-oss checkpoint, bf16 or MXFP4 on disk, in `dtype` on `device`. Raises OSError, ValueError."""

    def __init__(self, path: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        # A worker's stderr is a log.
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
        AttentionInterface.register(_ATTENTION, paged_attention)
        config = GptOssConfig.from_pretrained(path, local_files_only=True)
        quantized = getattr(config, "quantization_config", None) is not None
        try:
            loaded: Any = GptOssForCausalLM.from_pretrained(
                path,
                config=config,
                local_files_only=True,
                dtype=dtype,
                attn_implementation=_ATTENTION,
                experts_implementation=_EXPERTS,
                quantization_config=Mxfp4Config(dequantize=True) if quantized else None,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except SafetensorError as error:
            raise ValueError(f"{path}: {error}") from error
        self._model: GptOssForCausalLM = loaded[0]
        # In their place transformers sets random weights.
        if bad := [*loaded[1]["missing_keys"], *(key for key, *_ in loaded[1]["mismatched_keys"])]:
            raise ValueError(f"{path}: {min(bad)} is missing, or its size is not that of config.json")
        torch.nn.Module.to(self._model, device)  # transformers does not type `to`
        self._device = device
        self.context_length: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self.kv_shape = KvShape(
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            windows=tuple(
                config.sliding_window if kind == "sliding_attention" else None
                for kind in config.layer_types or ()
            ),
        )

    def forward(self, token_ids: list[int], positions: list[int], paged: PagedBatch) -> torch.Tensor:
        """Run T tokens at their `positions`, writing KV to the pool; returns hidden states [T, hidden]."""
        states: torch.Tensor = self._model.model(
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            attention_mask=_NO_MASK,
            use_cache=False,
            paged=paged,
        ).last_hidden_state
        return states[0]

    def logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """The float32 logits [len(rows), vocab] of these rows of hidden states."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._device)
        logits: torch.Tensor = self._model.lm_head(hidden.index_select(0, index))
        return logits.float()
