"""Workers that were set up wrongly, and what `status` and `why` say of them."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.files import FilesDiscovery
from baton.messages import Role
from operations.commands import main
from tests.certificates import Authority
from tests.stack import Stack
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), {"BATON_LIVENESS_S": "2"}) as stack:
        stack.frontend()
        for role in Role:
            stack.worker(role.value, "--name", f"{role.value}-0", name=role.value)
        stack.wait_ready(1, 1)
        yield stack


class Shown:
    """Waits until a tool prints a line with these words."""

    def __init__(self, stack: Stack, capsys: Any) -> None:
        self._url, self._capsys = stack.url, capsys

    def line(self, *words: str) -> None:
        def is_shown() -> bool:
            main(["status", "--url", self._url])
            lines = self._capsys.readouterr().out.splitlines()
            return any(all(word in line for word in words) for line in lines)

        wait_for(is_shown)


@pytest.fixture
def shown(stack: Stack, capsys: pytest.CaptureFixture[str]) -> Shown:
    return Shown(stack, capsys)


def test_a_worker_of_another_model(stack: Stack, shown: Shown) -> None:
    other = stack.worker("decode", "--served-model-name", "typo", name="other")
    shown.line("model typo has no prefill worker")
    other.kill()


def test_a_worker_with_tls_beside_a_frontend_without(stack: Stack, shown: Shown, tmp_path: Path) -> None:
    plain, stack.environ = stack.environ, stack.environ | Authority(tmp_path / "tls").environ("worker")
    secured = stack.worker("decode", "--name", "decode-tls", name="secured")
    stack.environ = plain
    shown.line("refused worker ", "TLS")
    shown.line("decode-tls", "distrusted")
    secured.kill()


async def test_a_worker_that_registered_with_a_dead_address(stack: Stack, shown: Shown) -> None:
    discovery = FilesDiscovery(Path(stack.environ["BATON_FILE_REGISTRY"]))
    watched = discovery.watch()
    genuine = await anext(watched)
    await watched.aclose()
    address = "tcp://127.0.0.1:9/dead.0"
    changes = {"worker_id": "dead", "incarnation": "dead", "address": address, "name": "decode-dead"}
    async with discovery.register(msgspec.structs.replace(genuine[0], **changes)):
        await asyncio.to_thread(shown.line, "decode-dead", "lost")


def test_a_prefill_worker_that_is_frozen_beside_one_decode_worker(
    stack: Stack, shown: Shown, capsys: pytest.CaptureFixture[str]
) -> None:
    (frozen,) = (each for each in stack.processes if each.name == "prefill")
    frozen.signal(signal.SIGSTOP)
    reply = stack.post("/v1/completions", {"x-request-id": "frozen"}, prompt="Hi", max_tokens=5)
    assert reply.status_code == 200
    shown.line("prefill-0", "lost")
    frozen.signal(signal.SIGCONT)
    assert main(["why", "frozen", "--url", stack.url]) == 0
    assert "slow stage: prefill on prefill-0, " in capsys.readouterr().out
    shown.line("prefill-0", "ready")
