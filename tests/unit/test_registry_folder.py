"""The file registry's folder: by default the user's own, and never one that another user could replace."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from baton.connect import Wires
from baton.registry_folder import UnsafeFolder, default_registry, make_private

ANOTHER = 65534  # the uid of `nobody`
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


def test_the_default_is_the_users_runtime_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert default_registry({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "baton" / "registry"


@pytest.mark.parametrize("runtime", ["", "relative", "/no/such/folder"])
def test_without_a_runtime_folder_the_default_is_in_the_users_home(tmp_path: Path, runtime: str) -> None:
    os.environ["HOME"] = str(tmp_path)
    assert default_registry({"XDG_RUNTIME_DIR": runtime}) == tmp_path / ".local/state/baton/registry"


@as_root
def test_a_runtime_folder_that_su_left_over_is_not_used(tmp_path: Path) -> None:
    os.environ["HOME"] = str(tmp_path)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, ANOTHER, ANOTHER)
    assert default_registry({"XDG_RUNTIME_DIR": str(theirs)}) == tmp_path / ".local/state/baton/registry"


def test_the_default_follows_no_temporary_folder(tmp_path: Path) -> None:
    os.environ["TMPDIR"] = str(tmp_path)
    assert not default_registry().is_relative_to(tmp_path)


def test_it_is_made_with_its_parents_for_this_user_alone(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]


@pytest.mark.parametrize("target", ["../to", "{folder}/to", "../from/../to"])
def test_links_lead_where_the_kernel_follows_them(tmp_path: Path, target: str) -> None:
    for name in ("from", "to"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "from" / "link").symlink_to(target.format(folder=tmp_path))
    make_private(tmp_path / "from" / "link" / "registry")
    assert (tmp_path / "to" / "registry").is_dir()
    assert os.listdir(tmp_path / "from") == ["link"]


@as_root
def test_a_group_without_a_name_is_not_the_users_own(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, 0, 54_321)
    shared.chmod(0o770)
    with pytest.raises(UnsafeFolder, match="Others can write"):
        make_private(shared / "registry")


def test_a_parent_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "mine" / "registry").mkdir(parents=True, mode=0o700)
    shared.chmod(0o777)
    with pytest.raises(UnsafeFolder, match=f"Others can write to {shared}.*--file-registry"):
        make_private(shared / "mine" / "registry")


def test_a_sticky_parent_such_as_tmp_is_fine(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    make_private(shared / "baton" / "registry")


def test_a_registry_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(UnsafeFolder, match="0700"):
        make_private(tmp_path)


def test_a_link_is_judged_by_where_it_leads(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "inside").mkdir(parents=True)
    shared.chmod(0o777)
    (tmp_path / "link").symlink_to("shared/../shared/inside")
    with pytest.raises(UnsafeFolder, match="Others can write to"):
        make_private(tmp_path / "link" / "registry")
    assert not (shared / "inside" / "registry").exists()


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UnsafeFolder, match="too many symbolic links"):
        make_private(tmp_path / "a" / "registry")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UnsafeFolder, match="is not a folder"):
        make_private(tmp_path / "file")
    with pytest.raises(UnsafeFolder, match="cannot be created"):
        make_private(tmp_path / "file" / "registry")


@as_root
def test_a_folder_that_another_user_made_first_is_refused(tmp_path: Path) -> None:
    """The old default: the user who creates TMPDIR/baton-UID first owns the parent and can replace the
    registry.
    """
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    parent = shared / f"baton-{os.getuid()}"
    code = f"import os; os.chdir({str(shared)!r}); os.setuid({ANOTHER}); os.mkdir({parent.name!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    registry = parent / "registry"
    registry.mkdir()

    with pytest.raises(UnsafeFolder, match=f"{parent} belongs to nobody, who could change the registry"):
        make_private(registry)


@as_root
def test_a_link_that_another_user_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("mine")
    os.lchown(tmp_path / "link", ANOTHER, ANOTHER)
    with pytest.raises(UnsafeFolder, match="belongs to nobody"):
        make_private(tmp_path / "link" / "registry")


@as_root
def test_a_group_that_is_the_users_own_may_write_and_no_other(tmp_path: Path) -> None:
    """With a group per user, a umask of 002 is common."""
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(0o775)
    make_private(parent / "registry")

    os.chown(parent, -1, pwd.getpwuid(1).pw_gid)  # `daemon`, on every system
    with pytest.raises(UnsafeFolder, match="Others can write"):
        make_private(parent / "registry")


@pytest.mark.parametrize("module", ["frontend", "workers"])
def test_processes_end_with_a_sentence_that_says_what_to_do(tmp_path: Path, module: str) -> None:
    tmp_path.chmod(0o777)
    arguments = ["--file-registry", str(tmp_path / "registry"), "--discovery-backend", "file"]
    if module == "workers":
        arguments += ["--model-path", "models/demo", "--engine", "mocker"]
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 2
    assert f"error: Others can write to {tmp_path}" in ended.stderr
    assert "--file-registry" in ended.stderr


def test_a_registry_that_is_not_the_users_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registry").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    with pytest.raises(UnsafeFolder, match="own it and set mode 0700"):
        make_private(tmp_path / "registry")


def test_a_folder_that_another_process_makes_meanwhile_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def make_twice(path: Path, mode: int) -> None:
        mkdir(path, mode)
        mkdir(path, mode)

    monkeypatch.setattr(Path, "mkdir", make_twice)
    make_private(tmp_path / "registry")


def test_wires_check_the_file_registry_only_if_it_is_the_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    Wires(discovery_backend="etcd", file_registry=tmp_path / "registry").check()
    with pytest.raises(UnsafeFolder):
        Wires(discovery_backend="file", file_registry=tmp_path / "registry").check()
