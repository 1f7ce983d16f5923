"""The file registry: its files as they age, change and are not ours, and what is cleaned up."""

import asyncio
import errno
import fcntl
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from baton.files import FilesDiscovery
from baton.messages import WorkerInfo
from tests.alive import no_descriptors
from tests.clock import jumping
from tests.registry import Snapshot, onlooker, worker
from tests.waiting import until


def look(folder: Path) -> Snapshot:
    """What a new watcher shows first."""
    return FilesDiscovery(folder).look()


@contextmanager
def held(path: Path, info: WorkerInfo | None = None) -> Iterator[None]:
    """A registration whose owner lives."""
    path.write_bytes(msgspec.json.encode(info or worker("w1")))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_only_the_user_can_read_a_registration(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        async with FilesDiscovery(tmp_path).register(worker("w1")):
            assert (tmp_path / "w1.json").stat().st_mode & 0o077 == 0
    finally:
        os.umask(umask)


async def test_no_link_leads_out_of_the_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "registry", tmp_path / "outside"
    folder.mkdir(mode=0o700)
    with held(outside):
        (folder / "w1.json").symlink_to(outside)
        (folder / f"w2.{os.getpid()}.tmp").symlink_to(outside)
        assert look(folder) == ()
        with pytest.raises(OSError, match="symbolic links"):
            await FilesDiscovery(folder).register(worker("w2")).__aenter__()
    assert msgspec.json.decode(outside.read_bytes(), type=WorkerInfo) == worker("w1")


async def test_a_registration_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "w1.json").mkdir()
    num_before = num_open()
    with pytest.raises(OSError, match=r"w1\.json"):
        await FilesDiscovery(tmp_path).register(worker("w1")).__aenter__()
    assert [path.name for path in tmp_path.iterdir()] == ["w1.json"]
    assert num_open() == num_before


@jumping
async def test_a_folder_that_cannot_be_written_for_a_while_costs_nothing_but_that_while(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "registry"
    discovery = FilesDiscovery(folder, ttl_s=0.3)
    async with discovery.register(worker("w1")), onlooker(discovery) as looker:
        await looker.until_shown("w1")
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("in the way")
        await asyncio.sleep(1)  # it retries meanwhile
        folder.unlink()
        await until((folder / "w1.json").exists)
        assert looker.lost == set()


def test_the_file_of_a_dead_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / "w1.json").write_bytes(msgspec.json.encode(worker("w1")))
    assert look(tmp_path) == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"not ours"),
        lambda path: path.mkdir(),
        os.mkfifo,
        lambda path: path.symlink_to("/etc/passwd"),
    ],
    ids=["another program's file", "folder", "pipe", "link"],
)
def test_what_is_not_ours_is_skipped_and_left_alone(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "junk.json"
    make(path)
    assert look(tmp_path) == ()
    assert os.path.lexists(path)


async def test_without_descriptors_the_known_workers_stay(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(FilesDiscovery(folder).register(worker("w1")))
        looker = await stack.enter_async_context(onlooker(FilesDiscovery(folder)))
        await looker.until_shown("w1")

        with no_descriptors():
            await asyncio.sleep(0.3)  # six polls of the folder; inaction has no event
        await stack.enter_async_context(FilesDiscovery(folder).register(worker("w2")))
        await looker.until_shown("w1", "w2")
        assert looker.lost == set()


def test_the_file_of_a_new_owner_is_not_taken_for_the_dead_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the name when the dead one's file was just read."""
    path, newer = tmp_path / "w1.json", tmp_path / "w1.tmp"
    path.write_bytes(msgspec.json.encode(worker("w1", incarnation="dead")))
    alive = worker("w1", incarnation="alive")
    flock = fcntl.flock

    def overtaken(fd: int, operation: int) -> None:
        flock(fd, operation)
        newer.rename(path)

    with held(newer, alive):
        with monkeypatch.context() as patched:
            patched.setattr(fcntl, "flock", overtaken)
            assert look(tmp_path) == ()
        assert look(tmp_path) == (alive,)


def test_no_more_files_are_read_than_there_can_be_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.files.MAX_WORKERS", 3)
    with ExitStack() as stack:
        for i in range(5):
            stack.enter_context(held(tmp_path / f"w{i}.json", worker(f"w{i}")))
        assert len(look(tmp_path)) == 3


def test_no_more_of_a_file_is_read_than_a_registration_may_have(tmp_path: Path) -> None:
    path = tmp_path / "w1.json"
    path.touch()
    os.truncate(path, 64 << 20)
    tracemalloc.start()
    try:
        assert not look(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


async def test_a_registry_without_room_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder or its inodes may be used up before the first byte is written, or a disk after it."""
    real, registry = os.open, FilesDiscovery(tmp_path / "registry")
    written, room = os.write, [10, 0]
    full = [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Quota exceeded")]

    def opened(path: str | Path, flags: int, *args: int, **more: int) -> int:
        if full and flags & os.O_CREAT:
            raise full.pop()
        return real(path, flags, *args, **more)

    def write(fd: int, value: bytes) -> int:
        if not room:
            return written(fd, value)
        if num_bytes := room.pop(0):
            return written(fd, value[:num_bytes])
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr("baton.files._FULL_RETRY_S", 0.01)
    monkeypatch.setattr("baton.files.os.open", opened)
    monkeypatch.setattr("baton.files.os.write", write)
    async with registry.register(worker("w")), onlooker(registry) as looker:
        assert not full
        await looker.until_shown("w")
    assert caplog.text.count("registration=not_written") == 3
