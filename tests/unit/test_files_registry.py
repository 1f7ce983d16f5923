"""The file registry's folder: who may write to it, and what is cleaned up."""

import asyncio
import fcntl
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from pathlib import Path

import msgspec
import pytest

from baton.discovery import MAX_WORKERS
from baton.files import FilesDiscovery, _View
from baton.messages import WorkerInfo
from tests.clock import jumping
from tests.registry import Snapshot, onlooker, worker
from tests.waiting import scaled, until


def look(folder: Path) -> Snapshot:
    async def main() -> Snapshot:
        async with aclosing(FilesDiscovery(folder).watch()) as snapshots:
            return await anext(snapshots)

    return asyncio.run(main())


def test_only_the_user_can_read_a_registration(tmp_path: Path) -> None:
    async def main() -> int:
        async with FilesDiscovery(tmp_path).register(worker("w1")):
            return (tmp_path / "w1.json").stat().st_mode

    umask = os.umask(0)
    try:
        assert asyncio.run(main()) & 0o077 == 0
    finally:
        os.umask(umask)


@pytest.mark.parametrize("place", ["link", "unfinished"])
def test_no_link_leads_out_of_the_folder(tmp_path: Path, place: str) -> None:
    folder, outside = tmp_path / "registry", tmp_path / "outside"
    folder.mkdir(mode=0o700)
    outside.write_bytes(msgspec.json.encode(worker("w1")))
    with outside.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if place == "link":
            (folder / "w1.json").symlink_to(outside)
            assert look(folder) == ()
            return
        (folder / f"w2.{os.getpid()}.tmp").symlink_to(outside)
        with pytest.raises(OSError, match="symbolic links"):
            register(folder, "w2")
    assert msgspec.json.decode(outside.read_bytes(), type=WorkerInfo) == worker("w1")


def register(folder: Path, name: str) -> None:
    """Register for a moment."""

    async def main() -> None:
        async with FilesDiscovery(folder).register(worker(name)):
            pass

    asyncio.run(main())


def test_a_registration_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "w1.json").mkdir()
    with pytest.raises(OSError, match=r"w1\.json"):
        register(tmp_path, "w1")
    assert [path.name for path in tmp_path.iterdir()] == ["w1.json"]


async def test_an_older_registration_withdraws_its_own_file_only(tmp_path: Path) -> None:
    older, newer = FilesDiscovery(tmp_path), FilesDiscovery(tmp_path)
    async with newer.register(worker("other")), AsyncExitStack() as stack:
        await stack.enter_async_context(older.register(worker("w1")))
        async with newer.register(worker("w1", incarnation="second")):
            await stack.aclose()
            assert (tmp_path / "w1.json").exists()
        assert not (tmp_path / "w1.json").exists()


@pytest.mark.parametrize(("age_s", "is_shown"), [(8, True), (12, False)])
def test_a_file_that_was_not_touched_for_ten_seconds_is_not_shown(
    tmp_path: Path, age_s: float, is_shown: bool
) -> None:
    path = tmp_path / "w1.json"
    path.write_bytes(msgspec.json.encode(worker("w1")))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(path, (time.time() - age_s,) * 2)
        assert (look(tmp_path) == (worker("w1"),)) == is_shown


@jumping
async def test_a_folder_that_cannot_be_written_for_a_while_costs_nothing_but_that_while(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "registry"
    async with FilesDiscovery(folder, ttl_s=0.3).register(worker("w1")):
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("in the way")
        await asyncio.sleep(1)  # it retries meanwhile
        folder.unlink()
        await until((folder / "w1.json").exists, limit_s=0.2)


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


def test_a_locked_but_untouched_file_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "w1.json"
    path.write_bytes(msgspec.json.encode(worker("w1")))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert look(tmp_path) == (worker("w1"),)
        os.utime(path, (0, 0))
        assert look(tmp_path) == ()
        assert path.exists()


async def test_a_deleted_folder_is_made_again_and_loses_no_worker(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    discovery = FilesDiscovery(folder, ttl_s=scaled(0.3))
    async with discovery.register(worker("w1")), onlooker(discovery) as looker:
        await looker.until_shown("w1")
        folder.rename(tmp_path / "elsewhere")
        async with onlooker(FilesDiscovery(folder, ttl_s=scaled(0.3))) as later:
            await later.until_shown("w1")
        assert looker.lost == set()
    assert list(folder.iterdir()) == []


async def test_without_descriptors_it_keeps_whom_it_knows_and_goes_on(tmp_path: Path) -> None:
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


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Every attempt of this process to open something fails with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/", os.O_RDONLY)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class _Raced(_View):
    """A view that a new owner overtakes: it takes the name after the folder was listed."""

    take_over: Callable[[], object] = staticmethod(lambda: None)

    def _names(self) -> list[tuple[str, int]]:
        names = super()._names()
        self.take_over()
        return names


def test_the_file_of_a_new_owner_is_not_taken_for_the_dead_ones(tmp_path: Path) -> None:
    path, newer = tmp_path / "w1.json", tmp_path / "w1.tmp"
    path.write_bytes(msgspec.json.encode(worker("w1", incarnation="dead")))
    newer.write_bytes(msgspec.json.encode(worker("w1", incarnation="alive")))
    view = _Raced(tmp_path, 10.0)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert view.look() == (worker("w1", incarnation="dead"),)
    with newer.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        view.take_over = lambda: newer.rename(path) if newer.exists() else None
        assert view.look() == ()
        assert view.look() == (worker("w1", incarnation="alive"),)
    view.close()


def test_no_more_names_are_read_than_there_can_be_workers(tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for i in range(MAX_WORKERS + 3):
        (tmp_path / f"{i}.json").touch()
    before = len(os.listdir("/proc/self/fd"))
    view = _View(tmp_path, 10.0)
    assert view.look() == ()
    assert len(os.listdir("/proc/self/fd")) - before <= MAX_WORKERS
    view.close()


@jumping
async def test_a_change_is_seen_within_a_tenth_of_a_second(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with aclosing(FilesDiscovery(tmp_path).watch()) as snapshots:
        assert await anext(snapshots) == ()
        async with FilesDiscovery(tmp_path).register(worker("w1")):
            began_s = loop.time()
            assert await anext(snapshots) == (worker("w1"),)
            assert 0.01 < loop.time() - began_s < 0.1


FULL = """
import asyncio, resource, sys
from pathlib import Path
from baton.files import FilesDiscovery
from tests.registry import worker
async def main():
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    registry, fleet = FilesDiscovery(Path(sys.argv[1])), ()
    async with asyncio.TaskGroup() as tasks:
        async def stay():
            async with registry.register(worker("w")):
                print("registered", flush=True)
        registering = tasks.create_task(stay())
        await asyncio.sleep(0.1)
        assert not registering.done()
        print("waiting", flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
asyncio.run(main())
"""


def test_a_registry_without_room_is_waited_for(tmp_path: Path) -> None:
    """A limit on file sizes stands for a full disk."""
    process = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "registry")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout.split() == ["waiting", "registered"]
    assert process.stderr.strip() == "registry=full kind=files error=[Errno 27] File too large"
