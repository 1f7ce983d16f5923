"""The fingerprint of a checkpoint: equal for copies, another one for other weights."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.checkpoint import fingerprint

_SIZE_BYTES = 1 << 20


def _checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for i in (1, 2):
        (folder / f"model-{i}.safetensors").write_bytes(bytes([i]) * _SIZE_BYTES)
    return folder


def _write(name: str, at: int, content: bytes) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(at)
            file.write(content)

    return change


CHANGES: dict[str, Callable[[Path], object]] = {
    "retrained": _write("model-2.safetensors", 0, b"\x03" * _SIZE_BYTES),
    "last layer retrained": _write(
        "model-2.safetensors", _SIZE_BYTES * 15 // 16, b"\x03" * (_SIZE_BYTES // 16)
    ),
    "file lost": lambda folder: (folder / "model-1.safetensors").unlink(),
    "renamed": lambda folder: (folder / "model-2.safetensors").rename(folder / "model-3.safetensors"),
    "appended": _write("model-1.safetensors", _SIZE_BYTES, b"\x01"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_weights_are_another_checkpoint(tmp_path: Path, change: Callable[[Path], object]) -> None:
    ours = _checkpoint(tmp_path / "ours")
    theirs = Path(shutil.copytree(ours, tmp_path / "theirs"))
    (theirs / "config.json").write_text('{"transformers_version": "5"}')
    assert fingerprint(ours) == fingerprint(theirs)
    change(theirs)
    assert fingerprint(ours) != fingerprint(theirs)


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) == fingerprint(tmp_path / "absent") == ""


def test_of_a_file_of_any_size_only_samples_are_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    assert fingerprint(tmp_path)
