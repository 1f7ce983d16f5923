"""A random gpt-oss checkpoint of 200 KB: sliding windows, YaRN, 4 experts, fixed seed."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

# On shared cores, two threads spin more than they compute.
torch.set_num_threads(1)

CONTEXT_LENGTH = 512
VOCAB_SIZE = 128
WINDOW = 16


def config() -> GptOssConfig:
    """Alternating sliding and full layers, two each, as in gpt-oss."""
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
    """Write config.json and bfloat16 weights, in gpt-oss's published format, into the folder `path`."""
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = GptOssForCausalLM(config())
    torch.nn.Module.to(model, torch.bfloat16)  # transformers does not type `to`
    model.save_pretrained(path)
    return path


# The 16 values of a 4-bit float, sign bit last; OCP Microscaling Formats 1.0, section 5.3.3.
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write_mxfp4_checkpoint(packed: Path, plain: Path) -> None:
    """Write the same model twice: experts in MXFP4, as gpt-oss is published, and in bfloat16."""
    weights = load_file(write_checkpoint(plain) / "model.safetensors")
    write_checkpoint(packed)
    packed_weights = dict(weights)
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_in, num_out = weights[name].shape
        shape = (num_experts, num_out, num_in // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
        del packed_weights[name]
        packed_weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        nibbles = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
        values = _FP4[nibbles.int()] * torch.exp2(scales.float() - 127)[..., None]
        weights[name] = values.flatten(-2).transpose(1, 2).contiguous().to(torch.bfloat16)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(packed_weights, packed / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((packed / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": _KEPT}
    (packed / "config.json").write_text(json.dumps(settings))


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
    return ids
