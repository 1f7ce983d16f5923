"""`python -m baton download REPO`: downloads a model from the Hugging Face hub and verifies its checksums."""

import dataclasses
import errno
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.flags import Parsed, flag
from baton.model_folder import cached, hub_cache
from operations.errors import CommandError

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

GIB = 1 << 30
EXCLUDES = ("original/*", "metal/*")
"""The same weights in two formats that no engine here reads: 120b would take 183 GB instead of 65."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DownloadSettings:
    """Flags of `python -m baton download REPO`."""

    repo: str = flag("", "such as openai/gpt-oss-120b", metavar="REPO", is_positional=True)
    local_dir: Path | None = flag(
        None, "folder for the model (default: the hub's cache)", env="MODEL_PATH", metavar="FOLDER"
    )
    exclude: str | None = flag(None, f"exclude, in addition to {' and '.join(EXCLUDES)}", metavar="PATTERN")
    revision: str = flag("main", "branch, tag or commit")
    skip_checksums: bool = flag(False, "do not verify checksums")


class DownloadError(CommandError):
    """The download failed; the message says why and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(text, exit_status=1)


def download(parsed: Parsed[DownloadSettings]) -> int:
    """Start or resume a download. Exit status: 0. Raises CommandError."""
    settings = parsed.settings
    if not settings.repo:
        raise CommandError("name a model, such as: python -m baton download openai/gpt-oss-120b")
    _fetch(settings.repo, settings.local_dir if settings.local_dir != Path(settings.repo) else None, settings)
    return 0


def _fetch(repo: str, local_dir: Path | None, settings: DownloadSettings) -> None:
    from huggingface_hub import HfApi  # noqa: PLC0415  an extra

    api, cache = HfApi(), None if local_dir else hub_cache()
    try:
        # Not left to snapshot_download: without network it accepts a partly filled folder as the model.
        commit = api.model_info(repo, revision=settings.revision).sha
        folder = local_dir or cached(repo) / "snapshots" / str(commit)
        place: dict[str, Any] = {"revision": commit, "cache_dir": cache, "local_dir": local_dir}
        patterns = [*EXCLUDES, *([settings.exclude] if settings.exclude else [])]
        files = api.snapshot_download(repo, **place, ignore_patterns=patterns, dry_run=True)
        _check_room(files, folder)
        api.snapshot_download(repo, **place, ignore_patterns=patterns)
        if not settings.skip_checksums:
            sys.stderr.write("verifying checksums\n")
            verdict = api.verify_repo_checksums(repo, **place)
            _check_sums(verdict, {file.filename for file in files}, repo, folder)
    except DownloadError:
        raise
    except Exception as error:  # the exceptions of the hub's HTTP client are not part of its API
        raise DownloadError(_explained(error, repo, local_dir or hub_cache())) from error
    sys.stdout.write(f"{folder}: {len(files)} files of {repo} at {commit}\n")


def _check_room(files: Sequence["DryRunFileInfo"], folder: Path) -> None:
    needed = sum(file.file_size or 0 for file in files if file.will_download)
    unfinished = folder.glob(".cache/huggingface/download/**/*.incomplete")
    needed -= sum(path.stat().st_size for path in unfinished)
    disk = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise DownloadError(
            f"{needed / GIB:.1f} GiB left to download, but {disk} has only {free / GIB:.1f} GiB free; "
            "make room, or choose another --local-dir"
        )
    sys.stderr.write(f"{len(files)} files, {max(0, needed) / GIB:.1f} GiB to fetch into {folder}\n")


def _check_sums(verdict: Any, names: set[str], repo: str, folder: Path) -> None:
    """Every file has the hub's SHA-256 (large files) or git hash (small ones)."""
    wrong = [mismatch["path"] for mismatch in verdict.mismatches] + list(verdict.missing_paths)
    if wrong := [path for path in wrong if path in names]:
        paths = " ".join(str((folder / path).resolve()) for path in wrong)  # the cache's are links
        raise DownloadError(f"these files differ from those of {repo}: rm -f {paths}, then run this again")


def _explained(error: Exception, repo: str, folder: Path) -> str:
    """One line on the cause and the fix, for each failure seen in practice."""
    from huggingface_hub import errors  # noqa: PLC0415  an extra

    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    again = "run the same command again to resume"
    known = (
        (errors.GatedRepoError, f"{repo} requires consent: agree at {hub}/{repo}, then export HF_TOKEN=..."),
        (errors.RevisionNotFoundError, f"{repo} has no such revision: correct or omit --revision"),
        (errors.RepositoryNotFoundError, f"{repo} is private or not on {hub}: check the name and HF_TOKEN"),
        (errors.HFValidationError, f"{repo} is not a repository name; write owner/name"),
        (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE is set: unset it to download"),
        (PermissionError, f"{folder} is not writable"),
        (status == 429, f"{hub}: too many requests (HTTP 429): wait, or export HF_TOKEN=..."),
        (status in (401, 403), f"{hub}: the token is refused (HTTP {status}): check HF_TOKEN"),
        (status, f"{hub}: answers HTTP {status}; {again}"),
        (is_full, f"the disk of {folder} is full; make room, then {again}"),
    )
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    unreached = f"{hub} cannot be reached ({reason}); check the network and the proxy (HTTPS_PROXY)"
    found = (
        text for cause, text in known if (isinstance(error, cause) if isinstance(cause, type) else cause)
    )
    return next(found, unreached)
