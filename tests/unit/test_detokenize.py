"""Text as it arrives: characters that come in pieces, and stop strings."""

import pytest

from frontend.text.detokenize import IncrementalDecoder, StopStrings


def test_a_character_is_held_back_until_it_is_whole() -> None:
    decoder = IncrementalDecoder()
    assert decoder.push("a日".encode()[:2]) == "a"
    assert decoder.push("日".encode()[1:2]) == ""
    assert decoder.push("日".encode()[2:] + b"b") == "日b"
    assert decoder.push(b"", is_last=True) == ""


def test_bytes_that_are_no_text_are_replaced() -> None:
    decoder = IncrementalDecoder()
    assert decoder.push(b"a\xffb\xe6") == "a�b"
    assert decoder.push(b"c") == "�c"


def test_a_cut_character_is_replaced_at_the_end_and_forgotten() -> None:
    decoder = IncrementalDecoder()
    assert decoder.push(b"a\xe6\x97") == "a"
    assert decoder.push(b"", is_last=True) == "�"
    assert decoder.push(b"b") == "b"


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["END", "\n\n"])
    assert stops.push("one\n") == ("one", False)
    assert stops.push("E") == ("\n", False)
    assert stops.push("N") == ("", False)
    assert stops.push("X") == ("ENX", False)
    assert stops.push("two EN") == ("two ", False)
    assert stops.push("D three") == ("", True)
    assert stops.push("four") == ("", True)
    assert stops.flush() == ""


def test_held_back_text_comes_out_at_the_end() -> None:
    stops = StopStrings(["END"])
    assert stops.push("the EN") == ("the ", False)
    assert stops.flush() == "EN"
    assert stops.flush() == ""


def test_the_stop_string_that_is_complete_first_counts() -> None:
    assert StopStrings(["abc", "b"]).push("xabc") == ("xa", True)
    assert StopStrings(["b", "ab"]).push("xab") == ("x", True)


@pytest.mark.parametrize("stops", [("ab?", "b!"), ("b!", "ab?")])
def test_what_may_become_any_stop_string_is_held_back(stops: tuple[str, ...]) -> None:
    assert StopStrings(stops).push("xab") == ("x", False)


@pytest.mark.parametrize("stops", [(), ("",)])
def test_without_stop_strings_text_passes(stops: tuple[str, ...]) -> None:
    assert StopStrings(stops).push("text") == ("text", False)
