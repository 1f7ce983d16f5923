"""The double's engine arguments, and the configuration that Baton and the double read."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.config import KVTransferConfig, StructuredOutputsConfig
from vllm.contract import dataclass_of
from workers.engines.library.model_facts import read_model_facts

_POOL_TOKENS = 1 << 16


def _create_engine_config(self: Any) -> SimpleNamespace:
    facts = read_model_facts(Path(self.model))
    longest = self.max_model_len or facts.context_length
    if longest > facts.context_length:
        raise ValueError(f"max_model_len ({longest}) is greater than the model's {facts.context_length}")
    num_seqs, num_tokens = self.max_num_seqs or 256, self.max_num_batched_tokens or 2048
    if num_tokens < num_seqs:
        raise ValueError(f"max_num_batched_tokens ({num_tokens}) is smaller than max_num_seqs ({num_seqs})")
    use_v2_model_runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    if use_v2_model_runner and self.enable_dbo:
        raise ValueError("Model Runner V2 does not yet support: dual batch overlap")
    block_size = self.block_size or 16
    num_blocks = self.num_gpu_blocks_override or _POOL_TOKENS // block_size
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=self.model, max_model_len=longest, dtype="torch.float32", facts=facts
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens, policy=self.scheduling_policy
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks=num_blocks,
            block_size=block_size,
            cache_dtype=self.kv_cache_dtype,
            enable_prefix_caching=self.enable_prefix_caching is not False,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=self.tensor_parallel_size),
        kv_transfer_config=self.kv_transfer_config,
        speculative_config=self.speculative_config,
        use_v2_model_runner=use_v2_model_runner,
        args=self,
    )


AsyncEngineArgs = dataclass_of(
    "AsyncEngineArgs",
    known={
        "vllm.config.kv_transfer.KVTransferConfig": KVTransferConfig,
        "vllm.config.structured_outputs.StructuredOutputsConfig": StructuredOutputsConfig,
    },
    create_engine_config=_create_engine_config,
)
