"""The folder of the file registry: its default, and checks that no other user can add workers to it."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

_ADVICE = (
    "Set --file-registry (BATON_FILE_REGISTRY) to a folder that you own, inside a folder that only you or "
    "root can write to."
)


class UnsafeFolder(PermissionError):
    """Another user could change the registry and have prompts sent to an address of theirs."""


def default_registry(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_RUNTIME_DIR/baton/registry` if that is this user's, else a folder in the user's home."""
    runtime = Path(environ.get("XDG_RUNTIME_DIR", ""))
    # It may be unset, deleted at logout, or another user's, as `su` keeps the variable.
    if runtime.is_absolute() and runtime.is_dir() and runtime.stat().st_uid == os.getuid():
        return runtime / "baton" / "registry"
    try:
        home = Path.home()
    except RuntimeError:
        raise UnsafeFolder(f"This user has no home folder for the file registry. {_ADVICE}") from None
    return home / ".local" / "state" / "baton" / "registry"


def make_private(folder: Path) -> None:
    """Create the folder with mode 0700 if missing. Raises UnsafeFolder if others could write to it, or to the
    folder that it is in. Folders further up are not checked: a watcher takes only files of this user.
    """
    folder = folder.absolute()
    try:
        for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
            missing.mkdir(0o700, exist_ok=True)
        own, parent = folder.stat(), folder.resolve().parent.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise UnsafeFolder(f"The registry {folder} cannot be created: {error}. {_ADVICE}") from error
    if not stat.S_ISDIR(own.st_mode):
        raise UnsafeFolder(f"The registry {folder} is not a folder. {_ADVICE}")
    if own.st_uid != os.getuid() or own.st_mode & 0o022:
        raise UnsafeFolder(f"Others can write to the registry {folder}: own it and set mode 0700. {_ADVICE}")
    # In a sticky folder such as /tmp others can add files, but not replace ours or root's.
    is_shared = parent.st_mode & 0o002 and not parent.st_mode & stat.S_ISVTX
    if is_shared or parent.st_uid not in (0, os.getuid()):
        raise UnsafeFolder(f"Others can write to {folder.parent} and replace the registry. {_ADVICE}")
