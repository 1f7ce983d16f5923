"""A model is given by its folder, or by its id on the Hugging Face hub if it is in the hub's cache."""

import contextlib
import os
import re
from pathlib import Path

import msgspec

from baton.messages import UNDECODABLE

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def model_folder(given: Path) -> Path:
    """The model's folder: the one itself, or the revision in a folder of the hub's cache. Raises ValueError
    with the command that downloads the model, which nothing else does.
    """
    repo = hub_id(given)
    if repo is None:
        with contextlib.suppress(OSError):  # who opens a folder that cannot be read says so
            return given if (given / "config.json").is_file() else snapshot_in(given) or given
        return given
    folder = snapshot_in(hub_cache() / f"models--{repo.replace('/', '--')}")
    if folder is None:
        raise ValueError(
            f"{given} is neither a folder here nor a model in {hub_cache()}; to download it: "
            f"{download_command(repo)}"
        )
    return folder


def download_command(repo: str) -> str:
    """Downloads a model with the hub's own tool, without its weights in formats that no engine here reads."""
    return f"hf download {repo} --exclude 'original/*' --exclude 'metal/*'"


def hub_id(given: Path) -> str | None:
    """`owner/name`, unless there is such a folder."""
    return str(given) if _HUB_ID.fullmatch(str(given)) and not given.exists() else None


def hub_cache() -> Path:
    """The hub's cache, where the hub's own library has it."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def snapshot_in(folder: Path) -> Path | None:
    """The model in its folder of the hub's cache: its branch `main`, else what was downloaded last."""
    main = folder / "refs" / "main"
    if main.is_file():
        named = folder / "snapshots" / main.read_text().strip()
        if (named / "config.json").is_file():
            return named
    found = [config.parent for config in folder.glob("snapshots/*/config.json")]
    return max(found, key=lambda snapshot: snapshot.stat().st_mtime, default=None)


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct, frozen=True):
    added_tokens: list[_AddedToken] = []


def control_ids(folder: Path) -> dict[str, int]:
    """The ids of the tokenizer's control tokens, by name; none without a tokenizer. Raises OSError or
    ValueError naming the file.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        tokens = msgspec.json.decode(path.read_bytes(), type=_Tokenizer).added_tokens
    except UNDECODABLE as error:
        raise ValueError(f"{path}: {error}") from error
    return {token.content: token.id for token in tokens if token.special}
