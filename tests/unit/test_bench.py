"""What `python -m baton bench` and `top` make of what they see: percentiles, tables, commands, rows."""

import pytest

from baton.flags import parse
from operations.bench import BenchSettings, aiperf, figures_of, spread, table
from operations.load import Sample
from operations.status import age
from operations.terminal import Line, printable
from operations.top import fit


def settings(*flags: str) -> BenchSettings:
    """Of this command line."""
    return parse(BenchSettings, flags, prog="bench", description="", environ={}).settings


def chunk(text: str = "", **more: object) -> dict[str, object]:
    """An event of a chat's stream."""
    return {"choices": [{"delta": {"content": text}}], **more}


def test_percentiles_are_values_that_were_seen() -> None:
    found = spread([0.004, 0.001, None, 0.002, 0.003])
    assert found == {"mean": 2.5, "p50": 2.0, "p90": 4.0, "p99": 4.0, "max": 4.0}
    assert spread(index / 1000 for index in range(1, 201))["p99"] == 198.0
    assert spread([None]) == {}


def test_a_sample_counts_visible_tokens_only() -> None:
    sample = Sample(0.0)
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}
    events = [(chunk(), 0.1), (chunk("a"), 0.2), (chunk("b"), 0.3), (chunk("c"), 0.6)]
    assert "".join(sample.add(event, after_s) for event, after_s in events) == "abc"
    assert sample.add({"choices": [], "usage": usage}, 0.9) == ""
    assert (sample.first_s, sample.last_s) == (0.2, 0.6)
    assert sample.longest_gap_s == pytest.approx(0.3)
    assert sample.itl_s == pytest.approx(0.1)
    assert (sample.num_prompt_tokens, sample.num_cached_tokens, sample.num_tokens) == (9, 2, 5)


def test_goodput_counts_answers_within_both_limits() -> None:
    def answered(first_s: float, last_s: float) -> Sample:
        return Sample(0.0, first_s=first_s, last_s=last_s, duration_s=2.0, num_tokens=11)

    samples = [answered(0.1, 0.2), answered(0.9, 1.0), answered(0.1, 1.9), Sample(1.0, failure="429 full")]
    figures = figures_of(samples, settings("--ttft-ms", "500", "--itl-ms", "50"))

    assert (figures["answered"], figures["failed"], figures["failures"]) == (3, 1, {"429 full": 1})
    assert (figures["requests_per_s"], figures["goodput_per_s"], figures["tokens_per_s"]) == (1.5, 0.5, 16.5)
    lines = list(table(figures))
    assert lines[0] == "3 answers in 2 s: 1.5 requests/s, 0.5 within the limits, 16.5 tokens/s"
    assert "failed 1: 429 full" in lines
    assert "goodput_per_s" not in figures_of(samples, settings())


def test_without_an_answer_the_table_has_dashes() -> None:
    lines = list(table(figures_of([Sample(0.0, failure="Connection refused")], settings())))
    assert lines[-1].split() == ["duration", "ms", *"-----"]


@pytest.mark.parametrize(
    ("flags", "most", "words"),
    [
        (
            ["--isl", "7"],
            100,
            "--synthetic-input-tokens-mean 7",
        ),
        ([], 100, "--concurrency 8 --request-count 100"),
        (["--rate", "2.5", "--seconds", "30"], 100_000, "--request-rate 2.5 --benchmark-duration 30"),
        (["--turns", "4"], 90, "--conversation-turn-mean 4 --conversation-turn-stddev 0"),
        (["--turns", "4"], 90, "--conversation-num 23"),
        (["--ttft-ms", "500", "--itl-ms", "20"], 1, "'time_to_first_token:500 inter_token_latency:20'"),
        (["--api-key", "secret"], 1, '--api-key "$BATON_API_KEY"'),
    ],
)
def test_aiperf_gets_the_same_load(flags: list[str], most: int, words: str) -> None:
    command = aiperf("m", most, "http://h:1", settings(*flags))
    assert words in command
    assert "secret" not in command


@pytest.mark.parametrize(
    "flags",
    [["--requests", "0"], ["--requests", "-1"], ["--seconds", "0"], ["--rate", "-2"], ["--isl", "many"],
     ["--concurrency", "1e9"], ["--osl", "0"], ["--ttft-ms", "nan"], ["--timeout-s", "inf"]],
)  # fmt: skip
def test_a_load_that_makes_no_sense_is_one_sentence(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        settings(*flags)
    printed = capsys.readouterr().err
    assert (ended.value.code, printed.count("\n")) == (2, 1)
    assert flags[0] in printed


def test_a_low_terminal_shows_some_of_each_section_and_counts_the_rest() -> None:
    parts = [
        [Line(f"{name}{row}") for row in range(num)]
        for name, num in zip("hpwse", (3, 0, 40, 6, 11), strict=True)
    ]
    shown = [line.text for line in fit(parts, 23)]
    assert len(shown) == 23
    assert shown[:3] == ["h0", "h1", "h2"]
    assert "... 30 more" in shown
    assert [text for text in shown if text[0] == "s"] == ["s0", "s1", "s2", "s3"]
    assert [line.text for line in fit(parts, 100)] == [line.text for part in parts for line in part]
    assert len(fit(parts, 5)) == 5


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59, "59s"), (125, "2m"), (7300, "2h"), (2e5, "2d")]
)
def test_ages_are_short(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_control_characters_never_reach_the_terminal() -> None:
    assert printable("a\x1b[2J\r\nb\x7f\u202e") == "a?[2J??b??"
