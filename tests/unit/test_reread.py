"""Files that are read again when they change: which changes are seen, and what a failure leaves."""

import threading
from pathlib import Path
from typing import TypeVar

import pytest

from baton.reread import Reread
from tests.alive import no_descriptors
from tests.waiting import wait_for

T = TypeVar("T")


@pytest.fixture(autouse=True)
def only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.reread.EVERY_S", 3600)


def now(file: Reread[T]) -> T:
    """Its content, looked at now."""
    file.check()
    return file.value


def test_content_of_the_same_length_is_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    file = Reread([path], path.read_text)
    for text in "23":
        other = tmp_path / "other"
        other.write_text(text)
        other.replace(path)
        assert now(file) == text


def test_a_failure_that_passes_is_logged_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    file = Reread([path], path.read_text)
    path.write_text("22")
    with no_descriptors():
        for _ in range(3):
            assert now(file) == "1"
    assert caplog.text.count("reread=failed") == 1
    assert now(file) == "22"


def test_files_are_looked_at_by_a_thread_while_somebody_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.reread.EVERY_S", 0.01)
    path = tmp_path / "file"
    path.write_text("1")
    num_before = threading.active_count()
    files = [Reread([path], path.read_text)]
    assert files[0].value == "1"
    path.write_text("22")
    wait_for(lambda: files[0].value == "22")
    files.clear()
    wait_for(lambda: threading.active_count() == num_before)


def test_what_no_one_expected_of_a_reading_leaves_the_content_too(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")

    def load() -> str:
        if (text := path.read_text()) == "22":
            raise MemoryError
        return text

    file = Reread([path], load)
    path.write_text("22")
    assert now(file) == "1"
    path.write_text("333")
    assert now(file) == "333"


def test_a_thread_that_cannot_start_is_started_by_the_next_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    file = Reread([path], path.read_text)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError))
        with pytest.raises(RuntimeError):
            _ = file.value
    path.write_text("22")
    assert file.value == "22"
