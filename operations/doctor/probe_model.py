"""Reads a model folder: its files, config.json, and whether each shard is complete."""

import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import msgspec

from baton.model_folder import snapshot_in
from operations.doctor.facts import Model, Shape, Shard

_MAX_JSON_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100 << 20
_INDEX = "model.safetensors.index.json"
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class _Config(msgspec.Struct):
    model_type: str
    num_hidden_layers: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count
    max_position_embeddings: _Count
    head_dim: _Count | None = None
    hidden_size: _Count = 1
    num_local_experts: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0
    dtype: str | None = None
    torch_dtype: str | None = None


class _Sizes(msgspec.Struct, frozen=True):
    total_size: Annotated[float, msgspec.Meta(ge=0, le=1 << 60)] = 0


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: _Sizes = _Sizes()


class _Tokenizer(msgspec.Struct):
    model: msgspec.Raw


def probe_model(path: Path) -> Model:
    """Read everything except the weights themselves; never raises."""
    try:
        return _probe(path)
    except OSError as error:  # an unreadable folder, a name that is too long
        return Model(path=str(path), is_folder=False, folder_problem=error.strerror or str(error))


def _probe(path: Path) -> Model:
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
        is_writable=os.access(path, os.W_OK),
        snapshot=str(snapshot_in(path) or "") or None,
        files=frozenset(p.name for p in path.iterdir() if p.is_file()),
        shape=_shape(shape) if shape else None,
        config_problem=config_problem,
        index_problem=index_problem,
        tokenizer_problem=tokenizer_problem,
        shards=tuple(_shard(path, name) for name in sorted(names)),
        total_bytes=int(index.metadata.total_size) if index else 0,
        num_unfinished=sum(1 for _ in path.glob(".cache/huggingface/download/**/*.incomplete")),
        disk_free_bytes=free,
    )


def _read(path: Path, kind: type[Any]) -> tuple[Any, str | None]:
    """(content, None) or (None, problem); (None, None) if there is no such file."""
    if not path.is_file():  # a pipe may never end
        return None, None
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            return None, f"larger than {_MAX_JSON_BYTES} bytes"
        return msgspec.json.decode(path.read_bytes(), type=kind), None
    except OSError as error:
        return None, error.strerror or str(error)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return None, str(error)


def _shape(config: _Config) -> Shape:
    return Shape(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim or max(1, config.hidden_size // config.num_attention_heads),
        num_experts=config.num_local_experts,
        max_positions=config.max_position_embeddings,
        dtype_bytes=_DTYPE_BYTES.get(config.dtype or config.torch_dtype or "bfloat16", 2),
    )


def _shard(folder: Path, name: str) -> Shard:
    path = folder / name
    try:
        if "/" in name or not path.is_file():
            return Shard(name=name, size_bytes=None, whole_bytes=None)
        return Shard(name=name, size_bytes=path.stat().st_size, whole_bytes=_promised_bytes(path))
    except OSError:  # not readable, or the name is invalid
        return Shard(name=name, size_bytes=None, whole_bytes=None)


def _promised_bytes(path: Path) -> int | None:
    """The file size that a safetensors header implies: 8 + header + the end of the last tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            return None
        try:
            header = json.loads(file.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            return None
    return 8 + length + max(ends, default=0)
