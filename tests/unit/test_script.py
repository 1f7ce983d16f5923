"""The mocker's script: scenes by the prompt's text, answers by the prompt's number of answers."""

from pathlib import Path

import pytest

from workers.engines.script import PlannedAnswer, Scene, Script, read_vocabulary

VOCABULARY, _, _ = read_vocabulary(Path("models/demo/tokenizer.json"))
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"é": 1}<|call|>'
FINAL = "<|channel|>final<|message|>Done.<|return|>"
PROMPT = "<|start|>user<|message|>Fix it<|end|><|start|>assistant"


def said(script: Script, prompt: str) -> str:
    """The answer's text, without control tokens."""
    return VOCABULARY.decode(script.answer(VOCABULARY.encode(prompt)))


def test_the_next_answer_is_played_when_the_prompt_has_the_one_before() -> None:
    script = Script([Scene(answers=[CALL, FINAL])], VOCABULARY)
    assert said(script, PROMPT) == 'commentary to=functions.f json{"é": 1}'
    assert said(script, PROMPT + CALL + "<|start|>assistant") == "finalDone."
    history = PROMPT + CALL + "<|start|>assistant<|channel|>final<|message|>Done.<|end|>"
    assert said(script, history + "<|start|>assistant") == "finalDone.", "the last is said again"


def test_the_first_scene_that_fits_the_prompt_is_played() -> None:
    script = Script([Scene(when="Break", answers=[CALL]), Scene(when="Fix", answers=[FINAL])], VOCABULARY)
    assert said(script, PROMPT) == "finalDone."
    assert script.answer(VOCABULARY.encode("Hello")) == ()


def test_any_text_is_spelled_as_it_is() -> None:
    text = "naïve 漢字 \n\t{}<|nope"
    assert VOCABULARY.decode(VOCABULARY.encode(text)) == text


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("answers: []", "not a script"),
        ("- answers: []", "has no answers"),
        ("- {answer: [x]}", "not a script"),
        ("[", "not a script"),
        ('- answers: ["<|nope|>"]', "no <|nope|>"),
    ],
)
def test_a_script_that_cannot_be_played_is_refused(tmp_path: Path, written: str, why: str) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(written, encoding="utf-8")
    with pytest.raises(ValueError, match=why.replace("|", r"\|")):
        Script.load(path, VOCABULARY)


@pytest.mark.parametrize("header", [(), (7, 8, 9)])
@pytest.mark.parametrize(("start", "stop"), [(0, 12), (2, 12), (3, 4), (5, 5), (6, 12)])
def test_the_tokens_of_an_answer_are_those_at_their_positions(
    header: tuple[int, ...], start: int, stop: int
) -> None:
    answer = PlannedAnswer(header, (1, 2, 3, 4), 2, 12, "length")
    assert list(answer.tokens(start, stop)) == [answer.token(i) for i in range(start, stop)]
