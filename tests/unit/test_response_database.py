"""The database of the stored responses, without a file."""

from contextlib import closing
from pathlib import Path

import pytest

from frontend.responses.database import MEMORY, connect


def test_a_store_in_memory_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(connect(MEMORY)) as db:
        assert db.execute("SELECT count(*) FROM responses").fetchone()[0] == 0
    assert list(tmp_path.iterdir()) == []
