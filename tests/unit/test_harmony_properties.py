"""What holds of the parser for every sequence of tokens. BATON_FUZZ_EXAMPLES=1000000 looks further."""

import os
from collections.abc import Iterable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontend.harmony.parse import Delta, Text
from frontend.turn.choice import StopStrings
from tests.fuzz_harmony import violation

NUM_EXAMPLES = int(os.environ.get("BATON_FUZZ_EXAMPLES", "200"))


def test_every_stream_becomes_the_same_messages_split_and_whole_and_without_calls_the_same_is_said() -> None:
    """Each sixteenth stream is an answer too, and the next one has no calls."""
    assert [found for i in range(16 * NUM_EXAMPLES) if (found := violation(1, i))] == []


@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.text("ab.", max_size=30),
    st.lists(st.text("ab.", max_size=4), max_size=3),
    st.lists(st.integers(0, 5), max_size=20),
)
def test_stop_strings_cut_at_the_one_that_is_complete_first(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    expected, is_expected = text, False
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            expected, is_expected = text[: end - max(map(len, ending))], True
            break

    limits = StopStrings(list(filter(None, stops)))
    start, sent = 0, ""
    for size in [*sizes, len(text)]:
        sent += text_of(limits.kept([Text(text[start : start + size], start, start + size)]))
        assert expected.startswith(sent)
        start += size
    assert sent + text_of(limits.kept((), is_last=True)) == expected
    assert (limits.met is not None) == is_expected


def text_of(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Text))
