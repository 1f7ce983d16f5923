"""What strangers send is counted, and logged once a minute."""

import pytest

from baton.strangers import Strangers


def test_a_flood_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    strangers = Strangers()
    for _ in range(3):
        strangers.note("here")
    assert strangers.num_messages == 3
    assert caplog.text.count("strange_messages=") == 1
