"""Checks of the model folder: is everything there and complete, and does a download fit on the disk?"""

import re
from collections.abc import Iterator

from operations.doctor.facts import GIB, Facts, Shard
from operations.doctor.findings import Finding, error, note, warning

_INDEX = "model.safetensors.index.json"
# Disk space of the guide's download, without original/* and metal/*.
_DOWNLOAD_BYTES = {"120b": 66 * GIB, "20b": 14 * GIB}


def folder(facts: Facts) -> Iterator[Finding]:
    """Is the folder there, with all files except the weights?"""
    model = facts.model
    if not model.is_folder:
        yield from _absent(facts)
        return
    if "config.json" not in model.files:
        if model.snapshot:
            yield _cache(facts, model.snapshot)
            return
        yield _missing(facts, "config.json", "no engine can build the model")
    elif model.config_problem:
        yield error(
            "config-bad", f"{model.path}/config.json: {model.config_problem}",
            breaks="the engine exits at start",
            repair=_download(facts),
        )  # fmt: skip
    elif model.shape and model.shape.model_type != "gpt_oss":
        yield error(
            "model-other", f"{model.path}/config.json: model_type is {model.shape.model_type}",
            breaks="Baton speaks Harmony, the format of gpt-oss: other models answer nonsense",
            repair=_download(facts),
        )  # fmt: skip
    if "tokenizer.json" not in model.files:
        yield _missing(facts, "tokenizer.json", "the frontend cannot turn text into tokens")
    elif model.tokenizer_problem:
        yield error(
            "tokenizer-bad", f"{model.path}/tokenizer.json: {model.tokenizer_problem}",
            breaks="the frontend refuses the model",
            repair=_download(facts),
        )  # fmt: skip
    if "generation_config.json" not in model.files:
        yield warning(
            "generation-config-missing", f"{model.path} has no generation_config.json",
            breaks="engines lack the stop tokens (<|return|>, <|call|>): tool calls do not end",
            repair=_download(facts),
        )  # fmt: skip


def _cache(facts: Facts, snapshot: str) -> Finding:
    return error(
        "model-cache", f"{facts.model.path} is a Hugging Face cache folder; the model is in a subfolder",
        breaks="workers exit at start: no config.json",
        repair=f"--model-path {snapshot}",
    )  # fmt: skip


def _absent(facts: Facts) -> Iterator[Finding]:
    path = facts.model.path
    if facts.model.folder_problem:
        yield error(
            "model-unreadable", f"{path}: {facts.model.folder_problem}",
            breaks="workers exit at start",
            repair=f"ls -ld {path}; chmod -R a+rX {path}, or run as its owner",
        )  # fmt: skip
        return
    yield error(
        "model-absent", f"{path} is not a folder, nor a model in the hub's cache",
        breaks="workers exit at start; nothing is downloaded automatically",
        repair=_download(facts),
    )  # fmt: skip
    needed = next((size for name, size in _DOWNLOAD_BYTES.items() if name in path.lower()), 0)
    yield from _disk(facts, needed)
    if not facts.host.hf_token:
        yield note(
            "token-missing", "no HF_TOKEN, and the model is not downloaded yet",
            breaks="nothing for openai/gpt-oss (public), but anonymous downloads are rate-limited",
            repair="export HF_TOKEN=... (huggingface.co/settings/tokens)",
        )  # fmt: skip


def _disk(facts: Facts, needed: int) -> Iterator[Finding]:
    if facts.model.disk_free_bytes < needed:
        yield error(
            "disk-full", f"{facts.model.disk_free_bytes / GIB:.0f} GiB free on {facts.model.path}'s disk, "
            f"but {needed / GIB:.0f} GiB left to download",
            breaks="the download stops in the middle",
            repair="df -h; choose another --local-dir",
        )  # fmt: skip
    if not facts.model.is_writable:
        yield error(
            "model-read-only", f"{facts.model.path} is incomplete and not writable",
            breaks="the download stops at its first file",
            repair=f"mount it writable for the download, or chown {facts.model.path}",
        )  # fmt: skip


def weights(facts: Facts) -> Iterator[Finding]:
    """Is every shard of the index there and complete?"""
    model = facts.model
    if not model.is_folder or model.snapshot:
        return
    if model.index_problem:
        yield error(
            "index-bad", f"{model.path}/{_INDEX}: {model.index_problem}",
            breaks="the engine cannot tell which file holds which weight",
            repair=_download(facts),
        )  # fmt: skip
    elif not model.shards:
        yield _missing(facts, "*.safetensors", "no weights to load")
    elif len(model.shards) > 1 and _INDEX not in model.files:
        yield _missing(facts, _INDEX, "the engine cannot tell which file holds which weight")
    missing = [shard.name for shard in model.shards if shard.size_bytes is None]
    if missing:
        yield error(
            "shard-missing", f"{len(missing)} of {len(model.shards)} weight files missing: {_some(missing)}",
            breaks="the engine exits after minutes of loading",
            repair=_download(facts),
        )  # fmt: skip
    broken = [shard.name for shard in model.shards if shard.size_bytes is not None and not _whole(shard)]
    if broken:
        yield error(
            "shard-broken", f"truncated weight files or git-lfs pointers: {_some(broken)}",
            breaks="loading fails with a header or deserialization error",
            repair=f"rm {model.path}/{broken[0]} && {_download(facts)}",
        )  # fmt: skip
    if missing or broken:
        yield from _disk(facts, max(1, model.total_bytes - model.weight_bytes))
    if model.num_unfinished and (missing or broken):
        yield note(
            "download-unfinished", f"{model.num_unfinished} downloads were interrupted ({model.path}/.cache)",
            breaks="nothing: the download resumes from there",
            repair=_download(facts),
        )  # fmt: skip


def _whole(shard: Shard) -> bool:
    return shard.size_bytes == shard.whole_bytes


def _missing(facts: Facts, name: str, breaks: str) -> Finding:
    return error(
        "file-missing", f"{facts.model.path} has no {name}",
        breaks=breaks,
        repair=_download(facts),
    )  # fmt: skip


def _download(facts: Facts) -> str:
    shape = facts.model.shape
    small = shape.num_layers < 36 if shape else re.search(r"(?<!\d)20b", facts.model.path.lower())
    size = "20b" if small else "120b"
    repo, path = f"openai/gpt-oss-{size}", facts.model.path
    return f"python -m baton download {repo}" + ("" if path == repo else f" --local-dir {path}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
