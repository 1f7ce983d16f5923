"""The gpt-oss model: loads a checkpoint with transformers (imported only here), runs flat batches."""

from pathlib import Path

import torch
import transformers
from transformers import AttentionInterface, GptOssConfig, GptOssForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from workers.engines.embedded.attention import PagedBatch, paged_attention
from workers.engines.embedded.pool import KvShape

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
        self._model = GptOssForCausalLM.from_pretrained(
            path,
            config=config,
            local_files_only=True,
            dtype=dtype,
            attn_implementation=_ATTENTION,
            experts_implementation=_EXPERTS,
            quantization_config=Mxfp4Config(dequantize=True) if quantized else None,
        )
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
