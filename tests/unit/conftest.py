"""What all unit tests have in common: a slow disk makes none fail."""

import pytest

from frontend.responses import store
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def slow_disks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WAIT_S", PATIENCE_S)
    monkeypatch.setattr(store, "_ANSWER_S", PATIENCE_S)
