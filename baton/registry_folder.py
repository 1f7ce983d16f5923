"""The folder of the file registry: which one it is by default, and that no other user can swap it."""

import grp
import os
import pwd
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_MAX_LINKS = 40
_ADVICE = (
    "Give --file-registry (BATON_FILE_REGISTRY) a folder of your own, in folders that only you and root can "
    "write to."
)


class UnsafeFolder(PermissionError):
    """Whoever could change the registry could have prompts sent to an address of theirs."""


def default_registry(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_RUNTIME_DIR/baton/registry` where that is safe, else a folder in this user's home."""
    runtime = Path(environ.get("XDG_RUNTIME_DIR", ""))
    # It may be unset, gone since the logout, or another user's: `su` keeps the variable.
    if runtime.is_absolute() and runtime.is_dir():
        with suppress(UnsafeFolder):
            _check_path(runtime)
            return runtime / "baton" / "registry"
    try:
        home = Path.home()
    except RuntimeError:
        raise UnsafeFolder(f"This user has no home for the file registry. {_ADVICE}") from None
    return home / ".local" / "state" / "baton" / "registry"


def make_private(folder: Path) -> None:
    """Make the folder, mode 0700, if it is not there. Raises UnsafeFolder if anybody but this user and root
    could write to it, or put another folder in its place.
    """
    try:
        status = _check_path(folder, make=True)
    except UnsafeFolder:
        raise
    except OSError as error:
        raise UnsafeFolder(f"The registry {folder} cannot be made: {error.strerror}. {_ADVICE}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeFolder(f"The registry {folder} is no folder. {_ADVICE}")
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UnsafeFolder(
            f"Others can write to the registry {folder}: make it yours, with mode 0700. {_ADVICE}"
        )


def _check_path(path: Path, *, make: bool = False) -> os.stat_result:
    """Walk down from the root, through links. Each step is safe because the ones before it are: where nobody
    else can write, nobody else can swap what was looked at.
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
                raise UnsafeFolder(f"{path} leads through too many links. {_ADVICE}")
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
    # In a sticky folder such as /tmp others can add, but not replace what is ours or root's.
    is_shared = status.st_mode & 0o002 or (status.st_mode & 0o020 and not _is_own_group(status.st_gid))
    if is_shared and not status.st_mode & stat.S_ISVTX:
        raise UnsafeFolder(f"Others can write to {step}, and so change the registry {path}. {_ADVICE}")


def _trusted() -> set[int]:
    """Root, this user, and who owns this very file: it is run in this user's name anyway."""
    return {0, os.getuid(), os.stat(__file__).st_uid}


def _is_own_group(gid: int) -> bool:
    """Whether this user is alone in the group, as many systems set it up, with a umask of 002."""
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
