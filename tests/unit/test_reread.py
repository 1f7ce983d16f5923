"""Files that are read again when they change: which changes are seen, and what a failure leaves."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from baton.reread import Reread, kept_current
from tests.alive import no_descriptors
from tests.waiting import until


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


async def test_each_of_several_files_is_kept_current_in_another_thread(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    threads: set[int] = set()

    def load(path: Path) -> str:
        threads.add(threading.get_ident())
        return path.read_text()

    for path in paths:
        path.write_text("1")
    files = [Reread([path], lambda path=path: load(path)) for path in paths]  # type: ignore[misc]  # mypy cannot infer its type
    threads.clear()
    async with kept_current(files, every_s=0.01):
        for path in paths:
            path.write_text("22")
        await until(lambda: [file.value for file in files] == ["22"] * 2)
    assert threading.get_ident() not in threads
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_failure_that_passes_is_logged_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.reread.EVERY_S", 0)
    path = tmp_path / "file"
    path.write_text("1")
    file = Reread([path], path.read_text)
    path.write_text("22")
    with no_descriptors():
        for _ in range(3):
            file.check()
    assert file.value == "1"
    assert caplog.text.count("reread=failed") == 1
    file.check()
    assert file.value == "22"


def test_wrong_content_is_logged_once_and_what_was_read_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    texts: list[str] = []

    def load() -> int:
        texts.append(path.read_text())
        return int(texts[-1])

    file = Reread([path], load)
    path.write_text("one")
    for _ in range(3):
        file.check()
    assert file.value == 1
    assert texts == ["1", "one"]  # each new connection checks the files
    assert caplog.text.count("reread=failed") == 1
