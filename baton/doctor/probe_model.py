"""Reads a model folder: which files are there, what config.json says, whether each shard is whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec

from baton.doctor.facts import Model, Shape, Shard

_MAX_JSON_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100 << 20
_INDEX = "model.safetensors.index.json"
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class _Config(msgspec.Struct):
    model_type: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    head_dim: int | None = None
    hidden_size: int = 0
    num_local_experts: int = 0
    dtype: str | None = None
    torch_dtype: str | None = None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tokenizer(msgspec.Struct):
    model: msgspec.Raw


def probe_model(path: Path) -> Model:
    """Everything that can be told without loading a weight; never raises."""
    free = shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists())).free
    if not path.is_dir():
        return Model(path=str(path), is_folder=False, disk_free_bytes=free)
    shape, config_problem = _read(path / "config.json", _Config)
    index, index_problem = _read(path / _INDEX, _Index)
    _, tokenizer_problem = _read(path / "tokenizer.json", _Tokenizer)
    names = set(index.weight_map.values()) if index else {p.name for p in path.glob("*.safetensors")}
    return Model(
        path=str(path),
        is_folder=True,
        files=frozenset(p.name for p in path.iterdir() if p.is_file()),
        shape=_shape(shape) if shape else None,
        config_problem=config_problem,
        index_problem=index_problem,
        tokenizer_problem=tokenizer_problem,
        shards=tuple(_shard(path, name) for name in sorted(names)),
        num_unfinished=sum(1 for _ in path.glob(".cache/huggingface/download/**/*.incomplete")),
        disk_free_bytes=free,
    )


def _read(path: Path, kind: type[Any]) -> tuple[Any, str | None]:
    """The file's content, or None and why not; (None, None) if there is no such file."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            return None, f"larger than {_MAX_JSON_BYTES} bytes"
        return msgspec.json.decode(path.read_bytes(), type=kind), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, error.strerror or str(error)
    except msgspec.DecodeError as error:
        return None, str(error)


def _shape(config: _Config) -> Shape:
    return Shape(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // max(1, config.num_attention_heads),
        num_experts=config.num_local_experts,
        max_positions=config.max_position_embeddings,
        dtype_bytes=_DTYPE_BYTES.get(config.dtype or config.torch_dtype or "bfloat16", 2),
    )


def _shard(folder: Path, name: str) -> Shard:
    path = folder / name
    if "/" in name or not path.is_file():
        return Shard(name=name, size_bytes=None, whole_bytes=None)
    return Shard(name=name, size_bytes=path.stat().st_size, whole_bytes=_promised_bytes(path))


def _promised_bytes(path: Path) -> int | None:
    """The length that a safetensors header promises: 8 + header + the end of the last tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            return None
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return None
    return 8 + length + max(ends, default=0)
