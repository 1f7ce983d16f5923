"""The folder of the file registry: its default, and checks that no other user can replace it."""

import grp
import os
import pwd
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_MAX_LINKS = 40
_ADVICE = (
    "Set --file-registry (BATON_FILE_REGISTRY) to a folder that you own, inside folders that only you and "
    "root can write to."
)


class UnsafeFolder(PermissionError):
    """Another user could change the registry and have prompts sent to an address of theirs."""


def default_registry(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_RUNTIME_DIR/baton/registry` if that is safe, else a folder in the user's home."""
    runtime = Path(environ.get("XDG_RUNTIME_DIR", ""))
    # It may be unset, deleted at logout, or another user's, as `su` keeps the variable.
    if runtime.is_absolute() and runtime.is_dir():
        with suppress(UnsafeFolder):
            _check_path(runtime)
            return runtime / "baton" / "registry"
    try:
        home = Path.home()
    except RuntimeError:
        raise UnsafeFolder(f"This user has no home folder for the file registry. {_ADVICE}") from None
    return home / ".local" / "state" / "baton" / "registry"


def make_private(folder: Path) -> None:
    """Create the folder with mode 0700 if missing. Raises UnsafeFolder if anyone but this user and root could
    write to it or replace it.
    """
    try:
        status = _check_path(folder, make=True)
    except UnsafeFolder:
        raise
    except OSError as error:
        raise UnsafeFolder(f"The registry {folder} cannot be created: {error.strerror}. {_ADVICE}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeFolder(f"The registry {folder} is not a folder. {_ADVICE}")
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UnsafeFolder(f"Others can write to the registry {folder}: own it and set mode 0700. {_ADVICE}")


def _check_path(path: Path, *, make: bool = False) -> os.stat_result:
    """Walk down from the root, following links. Each step is safe because those before it are: where no other
    user can write, none can replace what was checked.
    """
    here, pending, num_links = Path("/"), list(path.absolute().parts[1:]), 0
    status = here.stat()
    while pending:
        name = pending.pop(0)
        if name == "..":
            here = here.parent
            continue
        child = here / name
        if make and not os.path.lexists(child):
            with suppress(FileExistsError):
                child.mkdir(0o700)
        status = child.lstat()
        _check_step(child, status, path)
        if stat.S_ISLNK(status.st_mode):
            num_links += 1
            if num_links > _MAX_LINKS:
                raise UnsafeFolder(f"{path} has too many symbolic links. {_ADVICE}")
            target = Path(os.readlink(child))
            pending[:0] = target.parts[1:] if target.is_absolute() else target.parts
            here = Path("/") if target.is_absolute() else here
        else:
            here = child
    return status


def _check_step(step: Path, status: os.stat_result, path: Path) -> None:
    if status.st_uid not in _trusted():
        raise UnsafeFolder(
            f"{step} belongs to {_name(status.st_uid)}, who could change the registry {path}. {_ADVICE}"
        )
    if stat.S_ISLNK(status.st_mode):
        return
    # In a sticky folder such as /tmp others can add files, but not replace ours or root's.
    is_shared = status.st_mode & 0o002 or (status.st_mode & 0o020 and not _is_own_group(status.st_gid))
    if is_shared and not status.st_mode & stat.S_ISVTX:
        raise UnsafeFolder(f"Others can write to {step} and so change the registry {path}. {_ADVICE}")


def _trusted() -> set[int]:
    """Root, this user, and the owner of this file, whose code this user runs anyway."""
    return {0, os.getuid(), os.stat(__file__).st_uid}


def _is_own_group(gid: int) -> bool:
    """Whether this user is the group's only member, as on systems with a umask of 002."""
    own_name = _name(os.getuid())
    try:
        members = {*grp.getgrgid(gid).gr_mem}
    except KeyError:
        return False
    members |= {user.pw_name for user in pwd.getpwall() if user.pw_gid == gid}
    return members == {own_name}


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
