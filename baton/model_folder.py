"""A model is given by its folder, or by its id on the Hugging Face hub if it is in the hub's cache."""

import re
from pathlib import Path

import msgspec

from baton.messages import UNDECODABLE

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_REVISIONS = "models--"
"""The beginning of a folder's name in the hub's cache; it has all revisions of a model."""


def model_folder(given: Path) -> Path:
    """The model's folder: the one itself, or the branch `main` in a folder of the hub's cache. Raises
    ValueError with the command that downloads the model, which nothing else does."""
    if repo := hub_id(given):
        if (folder := _cached(repo)) is not None:
            return folder
        raise ValueError(
            f"{given} is neither a folder here nor a model in the hub's cache; to download it: "
            f"{download_command(repo)}"
        )
    if given.name.startswith(_REVISIONS):
        repo = given.name.removeprefix(_REVISIONS).replace("--", "/", 1)
        return _cached(repo, given.parent) or given
    return given


def _cached(repo: str, cache: Path | None = None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  most models are given as folders

    found = try_to_load_from_cache(repo, "config.json", cache)
    return Path(found).parent if isinstance(found, str) else None


def download_command(repo: str) -> str:
    """Downloads a model with the hub's own tool, without its weights in formats that no engine here reads."""
    return f"hf download {repo} --exclude 'original/*' --exclude 'metal/*'"


def hub_id(given: Path) -> str | None:
    """`owner/name`, unless there is such a folder."""
    return str(given) if _HUB_ID.fullmatch(str(given)) and not given.exists() else None


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct, frozen=True):
    added_tokens: list[_AddedToken] = []


def control_ids(folder: Path) -> dict[str, int]:
    """The ids of the tokenizer's control tokens, by name; none without a tokenizer. Raises OSError or
    ValueError naming the file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        tokens = msgspec.json.decode(path.read_bytes(), type=_Tokenizer).added_tokens
    except UNDECODABLE as error:
        raise ValueError(f"{path}: {error}") from error
    return {token.content: token.id for token in tokens if token.special}
