"""The folder of the file registry: who may write to it, and what is cleaned up."""

import asyncio
import fcntl
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from pathlib import Path

import msgspec
import pytest

from baton.files import FilesDiscovery
from tests.registry import Snapshot, onlooker, worker
from tests.waiting import scaled


def look(folder: Path) -> Snapshot:
    async def main() -> Snapshot:
        async with aclosing(FilesDiscovery(folder).watch()) as snapshots:
            return await anext(snapshots)

    return asyncio.run(main())


def test_the_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "runtime" / "registry"
    assert look(folder) == ()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="Others can write to"):
        look(tmp_path)


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


def test_a_locked_file_that_nobody_touches_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "w1.json"
    path.write_bytes(msgspec.json.encode(worker("w1")))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert look(tmp_path) == (worker("w1"),)
        os.utime(path, (0, 0))
        assert look(tmp_path) == ()
        assert path.exists()


def test_a_folder_that_was_deleted_loses_nobody_and_is_made_again(tmp_path: Path) -> None:
    async def main() -> None:
        folder = tmp_path / "registry"
        discovery = FilesDiscovery(folder, ttl_s=scaled(0.3))
        async with discovery.register(worker("w1")), onlooker(discovery) as looker:
            await looker.until_shown("w1")
            folder.rename(tmp_path / "elsewhere")
            async with onlooker(FilesDiscovery(folder, ttl_s=scaled(0.3))) as later:
                await later.until_shown("w1")
            assert looker.lost == set()
        assert list(folder.iterdir()) == []

    asyncio.run(main())


def test_without_descriptors_it_keeps_whom_it_knows_and_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        folder = tmp_path / "registry"
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(FilesDiscovery(folder).register(worker("w1")))
            looker = await stack.enter_async_context(onlooker(FilesDiscovery(folder)))
            await looker.until_shown("w1")

            with no_descriptors():
                await asyncio.sleep(0.3)  # six looks at the folder; that nothing happens has no event
            await stack.enter_async_context(FilesDiscovery(folder).register(worker("w2")))
            await looker.until_shown("w1", "w2")
            assert looker.lost == set()

    asyncio.run(main())


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
