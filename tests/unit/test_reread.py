"""Files that are read again when they change: which changes are seen, and what a failure leaves."""

from pathlib import Path

import pytest

from baton.reread import Reread
from tests.alive import no_descriptors
from tests.waiting import wait_for


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is looked at with each use."""
    monkeypatch.setattr("baton.reread.EVERY_S", 0)
    (tmp_path / "file").write_text("1")
    return tmp_path / "file"


def test_content_of_the_same_length_is_another(path: Path) -> None:
    file = Reread([path], path.read_text)
    for text in "23":
        other = path.with_name("other")
        other.write_text(text)
        other.replace(path)
        assert file.value == text


def test_files_are_looked_at_once_in_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.reread.EVERY_S", 3600)
    file = Reread([path], path.read_text)
    assert file.value == "1"
    path.write_text("22")
    assert file.value == "1"
    monkeypatch.setattr("baton.reread.EVERY_S", 0.01)
    wait_for(lambda: file.value == "22")


def test_a_failure_that_passes_is_logged_once_and_tried_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Reread([path], path.read_text)
    path.write_text("22")
    with no_descriptors():
        for _ in range(3):
            assert file.value == "1"
    assert caplog.text.count("reread=failed") == 1
    assert file.value == "22"


def test_what_no_one_expected_of_a_reading_leaves_the_content_too(path: Path) -> None:
    def load() -> str:
        if (text := path.read_text()) == "22":
            raise MemoryError
        return text

    file = Reread([path], load)
    path.write_text("22")
    assert file.value == "1"
    path.write_text("333")
    assert file.value == "333"
