"""The embedded stack that system tests share: starting one takes longer than most tests."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from tests.conftest import LaunchServer
from tests.launched import MOCKER, Launch, Run
from tests.stack import Stack, running_stack
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker with the demo model: leave them running."""
    with running_stack(tmp_path_factory.mktemp("demo")) as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    """OpenAI's SDK, for the stack of the test's module."""
    with openai.OpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs launch scripts, with the mocker by default, until the end of the test."""
    with ExitStack() as stopping:

        def run(command: str, engine: Mapping[str, str] = MOCKER, **environ: str) -> Launch:
            script, *arguments = command.split()
            folder = tmp_path / environ.pop("FOLDER", "run")
            launch = Launch(folder, *arguments, script=script, engine=engine, image=None, **environ)
            stopping.callback(launch.stop)
            return launch

        yield run


@pytest.fixture
def services(launch_etcd: LaunchServer, launch_nats: LaunchServer) -> dict[str, str]:
    """The variables of a launch with etcd and NATS of its own."""
    return {"ETCD_ENDPOINTS": launch_etcd().url, "NATS_SERVER": launch_nats().url}
