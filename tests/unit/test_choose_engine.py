"""Choosing an engine without --engine: the one that is installed, or what to set instead."""

import shlex

import pytest

from baton.flags import parse
from workers.engines.build import with_engine
from workers.flags import WorkerSettings
from workers.settings import SettingsError


def chosen(line: str, installed: set[str]) -> str | None:
    parsed = parse(WorkerSettings, shlex.split(line), prog="p", description="d", environ={})
    complete = with_engine(parsed, installed.__contains__)
    assert complete.sources["engine"] == ("chosen" if parsed.settings.engine is None else "flag")
    return complete.settings.engine


@pytest.mark.parametrize(
    ("line", "installed", "engine"),
    [
        ("--max-batch-size 4", {"tensorrt_llm", "transformers"}, "trtllm"),
        ("", {"vllm", "transformers"}, "vllm"),
        ("--extra-engine-args no/such.yaml", {"transformers"}, "embedded"),
        ("--engine mocker", set(), "mocker"),
    ],
)
def test_the_given_engine_is_taken_or_else_the_installed_one(
    line: str, installed: set[str], engine: str
) -> None:
    assert chosen(line, installed) == engine


@pytest.mark.parametrize(
    ("installed", "says"),
    [(set(), "no engine is installed"), ({"tensorrt_llm", "vllm"}, "set --engine trtllm or --engine vllm")],
)
def test_without_a_choice_the_error_names_what_to_do(installed: set[str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        chosen("", installed)
