"""Files that are read again when they change: which changes are seen, and what a failure leaves."""

import asyncio
import os
import threading
from pathlib import Path

from baton.reread import Reread, kept_current
from tests.waiting import until


def test_a_change_during_the_first_reading_is_seen_later(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def load() -> str:
        text = path.read_text()
        if text == "old":
            path.write_text("newer")
        return text

    file = Reread([path], load)
    assert file.value == "old"
    file.check()
    assert file.value == "newer"


def test_content_of_the_same_length_is_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    file = Reread([path], path.read_text)
    for text in "23":
        other = tmp_path / "other"
        other.write_text(text)
        other.replace(path)
        file.check()
        assert file.value == text


def test_what_was_read_stays_while_its_folder_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "file"
    path.write_text("1")
    file = Reread([path], path.read_text)
    path.unlink()
    folder.rmdir()
    folder.write_text("in the way")
    file.check()
    assert file.value == "1"
    os.remove(folder)
    folder.mkdir()
    path.write_text("2")
    file.check()
    assert file.value == "2"


def test_each_of_several_files_is_kept_current_in_another_thread(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    threads: set[int] = set()

    def load(path: Path) -> str:
        threads.add(threading.get_ident())
        return path.read_text()

    for path in paths:
        path.write_text("1")
    files = [Reread([path], lambda path=path: load(path)) for path in paths]  # type: ignore[misc]  # mypy cannot infer its type

    async def main() -> None:
        threads.clear()
        async with kept_current(files, every_s=0.01):
            for path in paths:
                path.write_text("22")
            await until(lambda: [file.value for file in files] == ["22"] * 2)
        assert threading.get_ident() not in threads
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
