"""A random gpt-oss checkpoint of 200 KB: sliding windows, YaRN, 4 experts; every value from a fixed seed."""

from pathlib import Path

import torch
from transformers import GptOssConfig, GptOssForCausalLM

# Two threads that share a core with others spin more than they compute.
torch.set_num_threads(1)

CONTEXT_LENGTH = 512
VOCAB_SIZE = 128
WINDOW = 16


def config() -> GptOssConfig:
    """Two sliding and two full layers, as gpt-oss alternates them."""
    return GptOssConfig(
        num_hidden_layers=4,
        hidden_size=32,
        vocab_size=VOCAB_SIZE,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    )


def write_checkpoint(path: Path) -> Path:
    """Write config.json and bfloat16 weights, as gpt-oss is published, into the folder `path`."""
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = GptOssForCausalLM(config())
    torch.nn.Module.to(model, torch.bfloat16)  # transformers' own `to` is not typed
    model.save_pretrained(path)
    return path


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
    return ids
