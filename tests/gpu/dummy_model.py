"""Model folders with gpt-oss's real configuration but no weights, for `load_format: dummy`."""

import json
import shutil
from pathlib import Path
from typing import Any

from tools.fetch_vocab import vocabulary_folder

_LAYERS_AND_EXPERTS = {"20b": (24, 32), "120b": (36, 128)}
_NOT_QUANTIZED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write_dummy_model(folder: Path, size: str) -> Path:
    """Write config.json of gpt-oss-20b or -120b, as published, and the tokenizer of `make vocab`."""
    vocabulary = vocabulary_folder()
    assert vocabulary is not None, "run `make vocab` first"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(vocabulary / "tokenizer.json", folder)
    _write(folder / "config.json", _config(*_LAYERS_AND_EXPERTS[size]))
    _write(folder / "generation_config.json", {"eos_token_id": [200002, 199999, 200012]})
    tokens = {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    _write(folder / "tokenizer_config.json", tokens | {"tokenizer_class": "PreTrainedTokenizerFast"})
    return folder


def _config(num_layers: int, num_experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "experts_per_token": 4,
        "num_experts_per_tok": 4,
        "num_local_experts": num_experts,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)],
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 8,
        "output_router_logits": False,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": _NOT_QUANTIZED},
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "5.17.0",  # otherwise transformers takes the tokenizer for an old Mistral's
        "use_cache": True,
        "vocab_size": 201088,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
