"""Coding agents from a fresh home, with only their base URL set: each fixes a bug, runs its test, asks an MCP
server, and goes on with a second task."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.clients.scene import NOTES, ScriptedStack, call, check_thoughts, final
from tests.stack import MODEL

HERE = Path(__file__).parent
BIN = HERE / "node/node_modules/.bin"
SESSION_S = 300
TASK = "Fix the bug in calc.py, run its test and read the red note."
MORE = "Run the test once more."
BUGGY = "def add(a, b):\n    return a - b\n"
CHECK = "from calc import add\n\nassert add(2, 3) == 5\nprint('calc is right')\n"
FIX = "sed -i 's/a - b/a + b/' calc.py"
RUN_TEST = f"{sys.executable} check.py"
RUN_AGAIN = f"{RUN_TEST} > again.txt"
TEST = {"command": RUN_TEST, "description": "Run the test"}
TEST_AGAIN = {"command": RUN_AGAIN, "description": "Run it again"}
DONE = final("The bug is fixed.")
STILL = final("It still passes.")
MCP_SERVER = [str(HERE / "notes_mcp.py"), json.dumps(NOTES)]

pytestmark = pytest.mark.skipif(not BIN.is_dir(), reason="npm has installed no agents")


class Agent:
    """An agent in a project with a bug and a fresh home; its model says what is given to `play`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = folder / "project"
        self.home = folder / "home"
        self.scripted: ScriptedStack | None = None
        self.project.mkdir()
        self.home.mkdir()
        (self.project / "calc.py").write_text(BUGGY)
        (self.project / "check.py").write_text(CHECK)

    def play(self, *answers: str) -> str:
        """Start the stack; its URL."""
        self.scripted = ScriptedStack(self.folder, answers)
        self.scripted.start()
        return self.scripted.stack.url

    def run(self, environ: Mapping[str, str], *command: str) -> str:
        """What its program prints."""
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.project,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), **environ},
            capture_output=True,
            text=True,
            timeout=SESSION_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    def check(self, printed: Sequence[str], num_rounds: int) -> None:
        """Both tasks are done, the model has read all results, and what it thought before each call."""
        assert "a + b" in (self.project / "calc.py").read_text()
        assert (self.project / "again.txt").read_text() == "calc is right\n"
        assert "The bug is fixed." in printed[0]
        assert "It still passes." in printed[1]
        assert self.scripted is not None
        prompts = self.scripted.prompts()
        assert "calc is right" in prompts[-1]
        assert NOTES["red"] in prompts[-1]
        check_thoughts(prompts, num_rounds)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    if agent.scripted is not None:
        agent.scripted.stack.stop()


def test_codex_fixes_a_bug_asks_an_mcp_server_and_goes_on(agent: Agent) -> None:
    url = agent.play(
        call(0, "exec_command", cmd=FIX),
        call(1, "exec_command", cmd=RUN_TEST),
        call(2, "mcp__notes.read_note", name="red"),
        DONE,
        call(3, "exec_command", cmd=RUN_AGAIN),
        STILL,
    )
    config = agent.home / ".codex/config.toml"
    config.parent.mkdir()
    config.write_text(
        f'model = "{MODEL}"\nmodel_provider = "baton"\n'
        f'[model_providers.baton]\nname = "Baton"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        f"[mcp_servers.notes]\ncommand = {json.dumps(sys.executable)}\nargs = {json.dumps(MCP_SERVER)}\n"
    )
    skip_checks = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    first = agent.run({}, "codex", "exec", *skip_checks, TASK)
    second = agent.run({}, "codex", "exec", "resume", *skip_checks, "--last", MORE)
    agent.check([first, second], num_rounds=4)


def test_claude_code_fixes_a_bug_asks_an_mcp_server_and_goes_on(agent: Agent) -> None:
    calc = {"file_path": str(agent.project / "calc.py")}
    url = agent.play(
        call(0, "Read", **calc),
        call(1, "Edit", **calc, old_string="a - b", new_string="a + b"),
        *(call(2, "Bash", **TEST), call(3, "mcp__notes__read_note", name="red"), DONE),
        *(call(4, "Bash", **TEST_AGAIN), STILL),
    )
    environ = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "any",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    servers = agent.folder / "mcp.json"
    server = {"type": "stdio", "command": sys.executable, "args": MCP_SERVER}
    servers.write_text(json.dumps({"mcpServers": {"notes": server}}))
    allowed = ("--permission-mode", "acceptEdits", "--allowedTools", "Bash,mcp__notes__read_note")
    settings = (*allowed, "--mcp-config", str(servers))
    first = agent.run(environ, "claude", "-p", TASK, *settings)
    second = agent.run(environ, "claude", "-p", MORE, "--continue", *settings)
    agent.check([first, second], num_rounds=5)


def test_opencode_fixes_a_bug_asks_an_mcp_server_and_goes_on(agent: Agent) -> None:
    calc = {"filePath": str(agent.project / "calc.py")}
    url = agent.play(
        call(0, "read", **calc),
        call(1, "edit", **calc, oldString="a - b", newString="a + b"),
        *(call(2, "bash", **TEST), call(3, "notes_read_note", name="red"), DONE),
        *(call(4, "bash", **TEST_AGAIN), STILL),
    )
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Baton",
        "options": {"baseURL": f"{url}/v1", "apiKey": "any"},
        "models": {MODEL: {}},
    }
    config = {
        "model": f"baton/{MODEL}",
        "provider": {"baton": provider},
        "mcp": {"notes": {"type": "local", "command": [sys.executable, *MCP_SERVER]}},
        "permission": "allow",
    }
    (agent.project / "opencode.json").write_text(json.dumps(config))
    environ = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    first = agent.run(environ, "opencode", "run", TASK)
    second = agent.run(environ, "opencode", "run", "--continue", MORE)
    agent.check([first, second], num_rounds=5)
