"""The embedded stack that system tests share: starting one takes longer than most tests."""

from collections.abc import Iterator

import pytest

from tests.stack import Stack, running_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker with the demo model: leave them running."""
    with running_stack(tmp_path_factory.mktemp("demo")) as stack:
        yield stack
