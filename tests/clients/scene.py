"""The scene that every client plays: a scripted model thinks, calls a tool, answers, and is asked again."""

import json
import os
import re
import secrets
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from frontend.text.tokenizer import ModelTokenizer
from tests.stack import MODEL, ROOT, Stack
from tests.waiting import scaled

# As fast as it goes: only the texts count here.
MOCKER = {"prefill_tokens_per_s": 1_000_000, "decode_step_ms": 0.1, "kv_transfer_ms": 0}
PROGRAM_S = scaled(120)
_TOKENIZER: Final = ModelTokenizer.load(ROOT / "models/demo")
TOOL_ROUNDS: Final = Counter[str]()
"""How many tool rounds there were, and in how many of them the model was shown its thoughts."""

# Only the tool knows them.
NOTES: Final = {name: secrets.token_hex(8) for name in ("red", "blue", "green")}
QUESTIONS: Final = ("What do the red and the blue note say?", "And the green one?")
ANSWERS: Final = ("I have read red and blue.", "I have read green.")

_MESSAGE = re.compile(r"<\|start\|>(.*?)<\|message\|>(.*?)<\|(?:end|call|return)\|>", re.DOTALL)


def read_note(name: str) -> str:
    """Reads a note.

    Args:
        name: The note's name, a colour."""
    return NOTES[name]


def thought(i: int) -> str:
    """What the model thinks before the call number `i` of its session."""
    return f"Thought {i}: this needs a tool."


def call(i: int, tool: str, **arguments: Any) -> str:
    """The call number `i` of a session as gpt-oss writes it; `tool` is in `functions` unless it has a dot."""
    recipient = tool if "." in tool else f"functions.{tool}"
    header = f"<|channel|>commentary to={recipient} <|constrain|>json<|message|>"
    analysis = f"<|channel|>analysis<|message|>{thought(i)}<|end|><|start|>assistant"
    return f"{analysis}{header}{json.dumps(arguments)}<|call|>"


def final(text: str) -> str:
    """An answer as gpt-oss writes it."""
    return f"<|channel|>final<|message|>{text}<|return|>"


SESSION: Final = (
    call(0, "read_note", name="red"),
    call(1, "read_note", name="blue"),
    final(ANSWERS[0]),
    call(2, "read_note", name="green"),
    final(ANSWERS[1]),
)
# smolagents has the model answer by a call of a tool of this name.
OTHER_SESSIONS: Final = {
    "final_answer": (
        call(0, "read_note", name="red"),
        call(1, "read_note", name="blue"),
        call(2, "final_answer", answer=ANSWERS[0]),
        call(3, "read_note", name="green"),
        call(4, "final_answer", answer=ANSWERS[1]),
    )
}


class ScriptedStack:
    """A stack whose model says `answers`, one after the other; to prompts that contain a key of `others`,
    what stands there."""

    def __init__(
        self, folder: Path, answers: Sequence[str], others: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self._log = folder / "prompts.jsonl"
        self._num_seen = 0
        self._folder = folder
        self._scenes = [{"when": when, "answers": list(lines)} for when, lines in (others or {}).items()]
        self._scenes.append({"answers": list(answers)})
        self.stack = Stack(folder)

    def start(self) -> None:
        """Start the processes; returns when they serve."""
        script, settings = self._folder / "script.yaml", self._folder / "mocker.yaml"
        script.write_text(yaml.safe_dump(self._scenes))
        settings.write_text(yaml.safe_dump(MOCKER | {"script": str(script), "prompt_log": str(self._log)}))
        self.stack.frontend("--model-alias", f"claude-*={MODEL}")
        for mode in ("prefill", "decode"):
            self.stack.worker(mode, yaml=settings)
        self.stack.wait_ready(1, 1)

    def prompts(self) -> list[str]:
        """What its workers were given to read since the last call, with control tokens."""
        lines = self._log.read_bytes().splitlines()[self._num_seen :] if self._log.exists() else []
        self._num_seen += len(lines)
        return [_TOKENIZER.decode(json.loads(line), shows_special=True) for line in lines]


def check_program(scripted: ScriptedStack, command: Sequence[str], environ: Mapping[str, str]) -> None:
    """A program plays the session, which it reads from its environment, and prints the answers as JSON."""
    scripted.prompts()
    scene = json.dumps({"NOTES": NOTES, "QUESTIONS": QUESTIONS})
    done = subprocess.run(
        command,
        env={**os.environ, **environ, "SCENE": scene, "BASE_URL": scripted.stack.url, "MODEL": MODEL},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    check_session(scripted.prompts(), json.loads(done.stdout))


def thoughts_before_calls(prompt: str) -> list[str | None]:
    """For each call since the last answer, the thought that stands right before it."""
    found: list[str | None] = []
    before: str | None = None
    for header, text in _MESSAGE.findall(prompt):
        if header == "assistant<|channel|>final":
            found.clear()
        elif header.startswith("assistant") and " to=" in header:  # on either side of the channel
            found.append(before)
        before = text if header == "assistant<|channel|>analysis" else None
    return found


def check_thoughts(prompts: Sequence[str], num_rounds: int) -> None:
    """In each of the session's tool rounds the model is shown the results with the thoughts before their
    calls, those of the earlier calls of the same question included."""
    rounds = [found for prompt in prompts if (found := thoughts_before_calls(prompt))]
    kept = [
        found == [thought(i) for i in range(last + 1 - len(found), last + 1)]
        for last, found in enumerate(rounds)
    ]
    TOOL_ROUNDS.update(all=len(rounds), kept=sum(kept))
    assert kept == [True] * num_rounds, rounds


def check_session(prompts: Sequence[str], answers: Sequence[str], num_rounds: int = 3) -> None:
    """The client ran its tool, the model read what it returned and what it had thought, the client got the
    answers. `num_rounds` are those whose calls the client sends back as calls."""
    assert list(answers) == list(ANSWERS), answers
    first, red, blue, second, green = prompts
    for note, prompt in zip(NOTES.values(), (red, blue, green), strict=True):
        assert note in prompt, prompt
    assert NOTES["red"] not in first
    assert QUESTIONS[1] not in blue
    assert QUESTIONS[1] in second
    check_thoughts(prompts, num_rounds)
