"""What holds of the parser for every sequence of tokens. BATON_FUZZ_EXAMPLES=1000000 looks further."""

import os
from collections.abc import Iterable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.messages import FinishReason
from frontend.harmony.conversation import Delta, Text
from frontend.turn.choice import StopStrings
from tests.fuzz_harmony import stream, violation
from tests.harmony_streams import check, check_answer, check_without_calls

FUZZ = settings(
    max_examples=int(os.environ.get("BATON_FUZZ_EXAMPLES", "200")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
streams = st.randoms(use_true_random=False).map(stream)
sizes_of_chunks = st.lists(st.integers(0, 7), max_size=20)


@FUZZ
@given(streams, sizes_of_chunks)
def test_every_stream_becomes_the_same_whole_messages_however_it_is_split(
    ids: list[int], sizes: list[int]
) -> None:
    check(ids, sizes)


@FUZZ
@given(streams, sizes_of_chunks, st.sampled_from(["stop", "length"]))
def test_an_answer_is_the_same_message_streamed_and_whole(
    ids: list[int], sizes: list[int], finish_reason: FinishReason
) -> None:
    check_answer(ids, sizes, finish_reason)


@FUZZ
@given(streams)
def test_without_calls_the_same_is_said_as_reasoning(ids: list[int]) -> None:
    check_without_calls(ids)


def test_the_fuzzer_runs() -> None:
    assert [found for i in range(200) if (found := violation(1, i))] == []


@FUZZ
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
