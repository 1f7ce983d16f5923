"""A frontend that other machines can reach: its API keys, from the file to each process."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack import ROOT, Stack
from tests.waiting import wait_for

BODY: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
CHAT = "/v1/chat/completions"


class Keys:
    """A keys file, whose lines come from the operator's tool."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: dict[str, str] = {}

    def add(self, name: str) -> dict[str, str]:
        """Make a key; the headers that present it."""
        command = [sys.executable, "-m", "baton", "key", name]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        with self.path.open("a") as file:
            file.write(made.stdout)
        self.path.chmod(0o600)
        self._made[name] = made.stderr.split()[-1]
        return {"authorization": f"Bearer {self._made[name]}"}

    def remove(self, name: str) -> None:
        """Take a key out of the file, as an editor does: by another file of that name."""
        lines = [line for line in self.path.read_text().splitlines(True) if not line.startswith(f"{name} ")]
        changed = self.path.with_suffix(".new")
        changed.write_text("".join(lines))
        changed.chmod(0o600)
        changed.replace(self.path)

    def are_in(self, text: str) -> bool:
        return any(key in text for key in self._made.values())


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "api-keys")


@pytest.fixture(scope="module")
def alice(keys: Keys) -> dict[str, str]:
    return keys.add("alice")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, keys: Keys, alice: dict[str, str]) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), {"BATON_API_KEYS_FILE": str(keys.path)}) as stack:
        stack.serve("prefill", "decode", flags=["--http-host", "0.0.0.0", "--num-processes", "2"])
        yield stack


def statuses(stack: Stack, headers: dict[str, str]) -> set[int]:
    """Of both processes, which take turns."""
    return {stack.post(CHAT, headers, **BODY).status_code for _ in range(4)}


def test_only_a_known_key_is_served_in_every_process(stack: Stack, alice: dict[str, str]) -> None:
    assert statuses(stack, alice) == {200}
    assert statuses(stack, {}) == statuses(stack, {"x-api-key": "sk-baton-guess"}) == {401}
    assert stack.post("/v1/messages", **BODY).json()["error"]["type"] == "authentication_error"
    assert stack.get("/v1/models").status_code == 401
    assert stack.get("/live").status_code == 200


def test_a_changed_file_counts_soon_in_every_process_and_a_broken_one_does_not(
    stack: Stack, keys: Keys, alice: dict[str, str]
) -> None:
    bob = keys.add("bob")
    wait_for(lambda: statuses(stack, bob) == {200})
    keys.remove("bob")
    wait_for(lambda: statuses(stack, bob) == {401})

    whole = keys.path.read_text()
    keys.path.write_text(whole + "carol sk-baton-not-a-digest\n")
    frontend = stack.processes[0]
    wait_for(lambda: statuses(stack, alice) == {200} and frontend.text().count("reread=failed") == 2)
    keys.path.write_text(whole)
    assert "sk-baton" not in frontend.text()
    assert not keys.are_in(frontend.text())


def test_a_response_is_found_with_its_key_only_by_every_process(
    stack: Stack, keys: Keys, alice: dict[str, str]
) -> None:
    dave = keys.add("dave")
    wait_for(lambda: statuses(stack, dave) == {200})
    made = stack.post("/v1/responses", alice, input="Hi", max_output_tokens=3).json()
    url = f"{stack.url}/v1/responses/{made['id']}"
    for headers, status in ((alice, 200), (dave, 404)):
        assert {httpx.get(url, headers=headers, verify=False).status_code for _ in range(4)} == {status}
    assert httpx.delete(url, headers=dave, verify=False).status_code == 404
    assert httpx.get(url, headers=alice, verify=False).json() == made
