"""The mocker's script: scenes by the prompt's text, answers by the prompt's number of answers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.engines.script import Script, Vocabulary

VOCABULARY = Vocabulary(Path("models/demo/tokenizer.json"))
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"é": 1}<|call|>'
FINAL = "<|channel|>final<|message|>Done.<|return|>"
PROMPT = "<|start|>user<|message|>Fix it<|end|><|start|>assistant"

Make = Callable[..., Script]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a script of these scenes."""

    def script(*scenes: dict[str, str | list[str]]) -> Script:
        path = tmp_path / "script.yaml"
        path.write_text(json.dumps(scenes))
        return Script(path, VOCABULARY)

    return script


def answer(script: Script, prompt: str) -> str:
    """The answer's text, without control tokens."""
    return VOCABULARY.decode(script.answer(VOCABULARY.encode(prompt)))


def test_the_next_answer_is_played_when_the_prompt_has_the_one_before(make: Make) -> None:
    script = make({"answers": [CALL, FINAL]})
    assert answer(script, PROMPT) == 'commentary to=functions.f json{"é": 1}'
    assert answer(script, PROMPT + CALL + "<|start|>assistant") == "finalDone."
    history = PROMPT + CALL + "<|start|>assistant<|channel|>final<|message|>Done.<|end|>"
    assert answer(script, history + "<|start|>assistant") == "finalDone.", "the last is repeated"


def test_the_first_scene_that_fits_the_prompt_is_played(make: Make) -> None:
    script = make({"when": "Break", "answers": [CALL]}, {"when": "Fix", "answers": [FINAL]})
    assert answer(script, PROMPT) == "finalDone."
    assert script.answer(VOCABULARY.encode("Hello")) == ()


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("answers: []", "not a script"),
        ("- answers: [x]\n- answers: []", "length >= 1"),
        ("- {answer: [x]}", "not a script"),
        ("[", "not a script"),
        ('- answers: ["<|nope|>"]', "no <|nope|>"),
    ],
)
def test_a_script_that_cannot_be_played_is_refused(tmp_path: Path, written: str, why: str) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(written, encoding="utf-8")
    with pytest.raises(ValueError, match=why.replace("|", r"\|")):
        Script(path, VOCABULARY)
