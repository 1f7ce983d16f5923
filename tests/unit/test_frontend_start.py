"""What the frontend refuses before it serves."""

from pathlib import Path

import pytest

from frontend.__main__ import main


@pytest.mark.parametrize("content", [None, b"short", b" " * 40])
def test_a_key_that_seals_nothing_ends_the_start_with_a_sentence(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    folder = f"--file-registry={tmp_path / 'registry'}"
    assert main(["--http-port", "0", folder, "--seal-key-file", str(path)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: --seal-key-file: ")
    assert str(path) in said
