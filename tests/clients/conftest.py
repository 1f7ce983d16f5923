"""One stack with a scripted model for all clients, and a count of the tool rounds that they had on it."""

from collections.abc import Iterator

import pytest

from tests.clients.scene import OTHER_SESSIONS, SESSION, TOOL_ROUNDS, ScriptedStack
from tests.stack import Stack, running_stack


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedStack]:
    scripted = ScriptedStack(tmp_path_factory.mktemp("scripted"), SESSION, OTHER_SESSIONS)
    scripted.start()
    yield scripted
    scripted.stack.stop()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo model."""
    with running_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    kept, num_rounds = TOOL_ROUNDS["kept"], TOOL_ROUNDS["all"]
    terminalreporter.write_line(f"thoughts kept in {kept} of {num_rounds} tool rounds")
