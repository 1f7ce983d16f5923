"""The mocker's script: scenes by the prompt's text, answers by the prompt's number of answers."""

from pathlib import Path

import pytest

from workers.engines.script import PlannedAnswer, Scene, Script, read_vocabulary

VOCABULARY, _, WORDS = read_vocabulary(Path("models/demo/tokenizer.json"))
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


def test_an_answer_counts_once_however_it_ended() -> None:
    script = Script([Scene(answers=["a", "b", "c", "d"])], VOCABULARY)
    for num, history in enumerate(["", FINAL, CALL + FINAL, CALL + FINAL + CALL]):
        assert said(script, history) == "abcd"[num]


def test_a_character_that_was_cut_hides_no_scene() -> None:
    script = Script([Scene(when="Fix", answers=["x"])], VOCABULARY)
    cut = next(i for i in range(1000) if VOCABULARY.decode([i]) == "\ufffd")
    assert script.answer([cut, *VOCABULARY.encode("Fix it")]) == VOCABULARY.encode("x")


def test_the_mockers_words_are_letters() -> None:
    assert len(WORDS) > 100
    assert VOCABULARY.decode(WORDS).replace(" ", "").isalpha()


def test_any_text_is_spelled_as_it_is() -> None:
    text = "naïve 漢字 \n\t{}<|nope"
    assert VOCABULARY.decode(VOCABULARY.encode(text)) == text


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("answers: []", "not a script"),
        ("- answers: []", "has no answers"),
        ("- answers: [x]\n- answers: []", "has no answers"),
        ("- answers: [x" + " " * (4 << 20) + "]", "at most 4194304 are allowed"),
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
