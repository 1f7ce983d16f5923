"""Facts from a gpt-oss checkpoint's files: context length, vocabulary, KV shape."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from baton.messages import NO_TOKEN, UNDECODABLE
from baton.model_folder import control_ids

T = TypeVar("T")


class _Config(msgspec.Struct, frozen=True):
    vocab_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`eos_token_id` is the model's first stop token, or NO_TOKEN; `kv_dtype` what `auto` means;
    `control_ids` the ids of the tokenizer's control tokens, by name."""

    vocab_size: int
    context_length: int
    eos_token_id: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    control_ids: dict[str, int]


def read_model_facts(model_path: Path) -> ModelFacts:
    """Read config.json and, if present, generation_config.json, hf_quant_config.json and tokenizer.json.

    Raises OSError or ValueError naming the file."""
    config = _decode(model_path / "config.json", _Config)
    generation = _decode(model_path / "generation_config.json", dict[str, Any], {})
    quantized = _decode(model_path / "hf_quant_config.json", dict[str, Any], {})
    stops = [generation.get("eos_token_id"), config.eos_token_id]
    stop_ids = [i for stop in stops for i in (stop if isinstance(stop, list) else [stop]) if i is not None]
    kv_dtype = quantized.get("quantization", {}).get("kv_cache_quant_algo")
    return ModelFacts(
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        eos_token_id=next(iter(stop_ids), NO_TOKEN),
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        kv_dtype=str(kv_dtype or config.dtype or config.torch_dtype or "bfloat16").lower(),
        control_ids=control_ids(model_path),
    )


def _decode(path: Path, kind: type[T], default: T | None = None) -> T:
    if default is not None and not path.is_file():
        return default
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except UNDECODABLE as error:
        raise ValueError(f"{path}: {error}") from error
