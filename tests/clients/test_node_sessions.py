"""SDKs for JavaScript: a session of two questions with a tool that they run themselves, streamed and not."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.scene import NOTES, QUESTIONS, ScriptedStack, check_session
from tests.stack import MODEL

NODE = Path(__file__).parent / "node"
SESSION_S = 120
CLIENTS = [
    ("openai.mjs", "chat"),
    ("openai.mjs", "responses"),
    ("anthropic.mjs", "messages"),
    ("ai_sdk.mjs", "chat"),
    ("ai_sdk.mjs", "responses"),
    ("ai_sdk.mjs", "compatible"),
    ("ai_sdk.mjs", "anthropic"),
]

pytestmark = pytest.mark.skipif(
    not (NODE / "node_modules/openai").is_dir(), reason="npm has installed no clients"
)


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize(("program", "api"), CLIENTS)
def test_a_session_with_a_tool(scripted: ScriptedStack, program: str, api: str, mode: str) -> None:
    scripted.prompts()
    scene = {"NOTES": NOTES, "QUESTIONS": QUESTIONS}
    done = subprocess.run(
        ["node", str(NODE / program), api, mode],
        env=os.environ | {"SCENE": json.dumps(scene), "BASE_URL": scripted.stack.url, "MODEL": MODEL},
        capture_output=True,
        text=True,
        timeout=SESSION_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    check_session(scripted.prompts(), json.loads(done.stdout))
