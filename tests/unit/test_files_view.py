"""What a watcher of the file registry sees as files age, change and are not ours."""

import errno
import fcntl
import os
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from baton.files import FilesDiscovery, _View
from tests.registry import worker
from tests.waiting import wait_for


@contextmanager
def held(path: Path) -> Iterator[None]:
    """A registration whose owner lives."""
    path.write_bytes(msgspec.json.encode(worker("w1")))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_from_the_future_ages_from_when_it_is_seen(tmp_path: Path) -> None:
    path, view = tmp_path / "w1.json", _View(tmp_path, 0.1)
    with held(path):
        os.utime(path, (time.time() + 3600,) * 2)
        wait_for(lambda: not view.look(), 10)
        view.close()


def test_a_touched_file_ages_again(tmp_path: Path) -> None:
    path, view = tmp_path / "w1.json", _View(tmp_path, 0.5)
    with held(path):
        os.utime(path, (0, 0))
        assert not view.look()
        os.utime(path)
        assert view.look()
        wait_for(lambda: not view.look(), 10)
        view.close()


def test_what_is_no_registration_is_told_once_and_let_go_with_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, view = tmp_path / "w1.json", _View(tmp_path, 10.0)
    num_before = num_open()
    path.write_text("junk")
    for _ in range(3):
        assert not view.look()
    assert caplog.text.count("registration=skipped") == 1
    path.unlink()
    assert not view.look()
    assert num_open() == num_before


def test_a_folder_that_cannot_be_listed_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "registry"
    folder.write_text("no folder")
    view = _View(folder, 10.0)
    for _ in range(3):
        assert not view.look()
    assert caplog.text.count("registry=unreachable") == 1
    folder.unlink()
    assert not view.look()
    folder.write_text("no folder")
    assert not view.look()
    assert caplog.text.count("registry=unreachable") == 2


async def test_a_registration_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "w1.json").mkdir()
    num_before = num_open()
    with pytest.raises(OSError, match=r"w1\.json"):
        await FilesDiscovery(tmp_path).register(worker("w1")).__aenter__()
    assert num_open() == num_before


async def test_what_a_process_that_was_killed_left_unfinished_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / f"w1.{os.getpid()}.tmp").write_bytes(b"x" * 10_000)
    async with FilesDiscovery(tmp_path).register(worker("w1")):
        view = _View(tmp_path, 10.0)
        assert view.look() == (worker("w1"),)
        view.close()


async def test_a_registration_is_complete_as_soon_as_it_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, replace, seen = _View(tmp_path, 10.0), Path.replace, []

    def replace_and_look(path: Path, target: Path) -> Path:
        replaced = replace(path, target)
        seen.append(view.look())
        return replaced

    monkeypatch.setattr(Path, "replace", replace_and_look)
    async with FilesDiscovery(tmp_path).register(worker("w1")):
        assert seen == [(worker("w1"),)]
    view.close()


def test_no_more_of_a_file_is_read_than_a_registration_may_have(tmp_path: Path) -> None:
    path, view = tmp_path / "w1.json", _View(tmp_path, 10.0)
    path.touch()
    os.truncate(path, 64 << 20)
    tracemalloc.start()
    try:
        assert not view.look()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    view.close()


def test_a_dead_workers_file_is_dead_for_all_who_look_at_once(tmp_path: Path) -> None:
    path, view = tmp_path / "w1.json", _View(tmp_path, 10.0)
    path.write_bytes(msgspec.json.encode(worker("w1")))
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not view.look()
    view.close()


def test_a_dead_workers_file_that_cannot_be_deleted_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    path, view = tmp_path / "w1.json", _View(tmp_path, 10.0)
    path.write_bytes(msgspec.json.encode(worker("w1")))
    monkeypatch.setattr(Path, "unlink", refuse)
    for _ in range(2):
        assert not view.look()
    view.close()
