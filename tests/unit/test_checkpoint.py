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


def _retrain(folder: Path) -> None:
    (folder / "model-2.safetensors").write_bytes(b"\x03" * _SIZE_BYTES)


def _retrain_the_last_layer(folder: Path) -> None:
    with (folder / "model-2.safetensors").open("r+b") as file:
        file.seek(_SIZE_BYTES * 15 // 16)
        file.write(b"\x03" * (_SIZE_BYTES // 16))


def _lose_a_file(folder: Path) -> None:
    (folder / "model-1.safetensors").unlink()


def _rename(folder: Path) -> None:
    (folder / "model-2.safetensors").rename(folder / "model-3.safetensors")


def _append(folder: Path) -> None:
    with (folder / "model-1.safetensors").open("ab") as file:
        file.write(b"\x01")


@pytest.mark.parametrize("change", [_retrain, _retrain_the_last_layer, _lose_a_file, _rename, _append])
def test_other_weights_are_another_checkpoint(tmp_path: Path, change: Callable[[Path], None]) -> None:
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
