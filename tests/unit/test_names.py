"""The names of a model: its own, the operator's, and the parts that clients leave of it."""

import pytest

from frontend.flags import parse_aliases
from frontend.routing.fleet import model_of, other_names

BIG, SMALL = "openai/gpt-oss-120b", "openai/gpt-oss-20b"
ALIASES = parse_aliases(
    f"claude-haiku*={SMALL}, claude-*={BIG},fast={SMALL},gone=no/model,gon*={BIG},openai/*={SMALL}"
)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        (BIG, BIG),
        ("gpt-oss-120b", BIG),
        ("claude-opus-4-6", BIG),
        ("claude-haiku-4-5", SMALL),
        ("fast", SMALL),
        ("gone", None),
        ("openai", None),
        ("Claude-opus-4-6", None),
        ("FAST", None),
        ("120b", None),
        ("openai/gpt-oss", SMALL),
        ("gpt-5", None),
        ("", None),
    ],
)
def test_a_name_means_one_model_or_none(asked: str, meant: str | None) -> None:
    assert model_of(asked, {BIG, SMALL}, ALIASES) == meant


def test_the_part_before_the_slash_is_enough_where_one_model_has_it() -> None:
    assert model_of("openai", {BIG}, ()) == BIG
    assert model_of("open", {BIG}, ()) is None


def test_aliases_without_patterns_are_listed() -> None:
    assert list(other_names({BIG, SMALL}, ALIASES)) == ["fast"]


@pytest.mark.parametrize("text", ["claude", "=x", "x=", "a=b,c"])
def test_an_alias_that_names_no_model_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be PATTERN=MODEL"):
        parse_aliases(text)
