"""SDKs for JavaScript: a session of two questions with a tool that they run themselves, streamed and not."""

from pathlib import Path

import pytest

from tests.clients.scene import ScriptedStack, check_program

NODE = Path(__file__).parent / "node"
CLIENTS = [
    ("openai.mjs", "chat"),
    ("openai.mjs", "responses"),
    ("anthropic.mjs", "messages"),
    ("anthropic.mjs", "runner"),
    ("anthropic.mjs", "thread"),
    ("ai_sdk.mjs", "chat"),
    ("ai_sdk.mjs", "responses"),
    ("ai_sdk.mjs", "compatible"),
    ("ai_sdk.mjs", "anthropic"),
    ("ai_sdk_6.mjs", "anthropic"),
]

pytestmark = pytest.mark.skipif(
    not (NODE / "node_modules/openai").is_dir(), reason="npm has installed no clients"
)


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize(("program", "api"), CLIENTS)
def test_a_session_with_a_tool(scripted: ScriptedStack, program: str, api: str, mode: str) -> None:
    check_program(scripted, ["node", str(NODE / program), api, mode], {})
