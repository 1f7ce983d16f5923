"""README's first screen: its picture and its sentences have the measured figures."""

import pytest

from benchmarks import curve
from benchmarks.tradeoff import ROOT, figures, svg

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_is_that_of_the_results(theme: str) -> None:
    assert (ROOT / f"docs/images/tradeoff-{theme}.svg").read_text() == svg(theme)
    assert f"docs/images/tradeoff-{theme}.svg" in README


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_of_one_gpu_is_that_of_the_results(theme: str) -> None:
    assert (ROOT / f"docs/images/one-gpu-{theme}.svg").read_text() == curve.svg(theme)
    assert f"docs/images/one-gpu-{theme}.svg" in README


def test_the_sentences_have_the_figures_of_the_picture() -> None:
    (between, throughput, _), (first, _, long) = figures()
    apart, aggregated, _ = between.values
    assert f"**{apart:.0f} ms instead of {aggregated:.0f} ms**" in README
    apart, aggregated, _ = throughput.values
    assert apart == pytest.approx(aggregated, rel=0.06)  # "at the same throughput"
    apart, aggregated, _ = first.values
    assert f"after {apart / 1e3:.1f} s instead of {aggregated / 1e3:.1f} s" in README
    apart, aggregated, _ = long.values
    assert f"{apart:.0f} tokens/s per GPU, against {aggregated:.0f} with" in README
