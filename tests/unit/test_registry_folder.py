"""The file registry's folder: by default the user's own, and never one that another user can change."""

import fcntl
import os
from pathlib import Path

import msgspec
import pytest

from baton.files import FilesDiscovery, UnsafeFolder, default_registry, make_private
from tests.registry import worker

ANOTHER = 65534  # the uid of `nobody`
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


def test_the_default_is_the_users_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_registry() == tmp_path / "baton" / "registry"


@pytest.mark.parametrize("runtime", ["", "relative", "/no/such/folder", pytest.param("/", marks=as_root)])
def test_without_a_runtime_folder_the_default_is_in_the_users_home(
    tmp_path: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`su` leaves the variable with a folder of another user."""
    if runtime == "/":
        os.chown(tmp_path, ANOTHER, ANOTHER)
        runtime = str(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setenv("HOME", "/home/user")
    assert default_registry() == Path("/home/user/.local/state/baton/registry")


def test_it_is_made_with_its_parents_for_this_user_alone_also_in_a_sticky_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)  # such as /tmp
    mask = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b")
        make_private(tmp_path / "c")
    finally:
        os.umask(mask)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "c")] == [0o700] * 3


@pytest.mark.parametrize(
    ("parent", "folder"),
    [(0o700, 0o777), (0o777, 0o700), (0o700, 0o720)],
    ids=["all may write", "all may replace it", "its group may write"],
)
def test_a_folder_that_others_can_change_is_refused(tmp_path: Path, parent: int, folder: int) -> None:
    (tmp_path / "parent" / "registry").mkdir(parents=True)
    (tmp_path / "parent" / "registry").chmod(folder)
    (tmp_path / "parent").chmod(parent)
    (tmp_path / "link").symlink_to("parent/registry")
    for way in ("parent/registry", "link"):
        with pytest.raises(UnsafeFolder, match=r"Others can write to .*--file-registry"):
            make_private(tmp_path / way)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "circle").symlink_to("circle")
    for name in ("file", "file/registry", "circle"):
        with pytest.raises(UnsafeFolder):
            make_private(tmp_path / name)


@as_root
@pytest.mark.parametrize("theirs", ["parent", "parent/registry"])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, theirs: str) -> None:
    (tmp_path / "parent" / "registry").mkdir(parents=True, mode=0o700)
    os.chown(tmp_path / theirs, ANOTHER, ANOTHER)
    with pytest.raises(UnsafeFolder):
        make_private(tmp_path / "parent" / "registry")


@as_root
async def test_a_watcher_takes_no_file_of_another_user(tmp_path: Path) -> None:
    """Even if the folder was replaced after it was checked."""
    path = tmp_path / "registry" / "w1.json"
    make_private(path.parent)
    path.write_bytes(msgspec.json.encode(worker("w1")))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert await anext(FilesDiscovery(path.parent).watch()) == (worker("w1"),)
        os.chown(path, ANOTHER, ANOTHER)
        assert await anext(FilesDiscovery(path.parent).watch()) == ()
