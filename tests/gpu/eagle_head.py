"""Random EAGLE3 heads in the published layout (`LlamaForCausalLMEagle3`), which guess among a few tokens.

A random head is never right among 200,000 tokens. If answers consist of the tokens that the head knows
(`random_weights.keep_rows`), some guesses are right and others wrong."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_head(folder: Path, target: Path, tokens: list[int]) -> Path:
    """Write config.json and model.safetensors of a head of the gpt-oss model in `target`."""
    model = json.loads((target / "config.json").read_text())
    hidden, dim = model["hidden_size"], model["head_dim"]
    inner = 2 * hidden
    num_q, num_kv = model["num_attention_heads"] * dim, model["num_key_value_heads"] * dim
    same = (
        "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
        "rms_norm_eps", "vocab_size",
    )  # fmt: skip
    config = {name: model[name] for name in same} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": inner,
        "draft_vocab_size": len(tokens),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": True},
    }
    layer = "midlayer"
    sizes = {
        "fc": (hidden, 3 * hidden),
        f"{layer}.self_attn.q_proj": (num_q, 2 * hidden),
        f"{layer}.self_attn.k_proj": (num_kv, 2 * hidden),
        f"{layer}.self_attn.v_proj": (num_kv, 2 * hidden),
        f"{layer}.self_attn.o_proj": (hidden, num_q),
        f"{layer}.mlp.gate_proj": (inner, hidden),
        f"{layer}.mlp.up_proj": (inner, hidden),
        f"{layer}.mlp.down_proj": (hidden, inner),
        "lm_head": (len(tokens), hidden),
    }
    norms = (
        "norm",
        *(f"{layer}.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    )
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"{name}.weight": torch.randn(size, generator=generator).mul(size[1] ** -0.5).bfloat16()
        for name, size in sizes.items()
    }
    weights |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    weights["d2t"] = torch.tensor(tokens) - torch.arange(len(tokens))  # what is added to a token of the head
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
