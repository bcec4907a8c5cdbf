"""Rules of the stop string finder."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.stop_strings import StopStringFinder

SMALL_TEXT = st.text(alphabet="ab\u00e9", max_size=24)
STOPS = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), max_size=4)


def _run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    finder = StopStringFinder(stops)
    text = "".join(finder.push(piece) for piece in pieces)
    return (text + finder.finish(), finder.matched)


def _find_naively(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_text_before_the_stop_is_kept_and_the_stop_is_not() -> None:
    """A stop string ends the text; neither it nor what follows comes out."""
    assert _run(["one END two"], ["END"]) == ("one ", "END")


def test_stop_is_found_across_pieces() -> None:
    """A stop string that came in three pieces is found, and none of it came out early."""
    finder = StopStringFinder(["</end>"])
    assert [finder.push(piece) for piece in ["ab</", "en", "d>cd"]] == ["ab", "", ""]
    assert finder.matched == "</end>"


def test_text_that_turns_out_not_to_be_a_stop_is_given_back() -> None:
    """Held text comes out as soon as it can no longer become a stop string."""
    finder = StopStringFinder(["<stop>"])
    assert finder.push("x<st") == "x"
    assert finder.push("y") == "<sty"


def test_held_text_comes_out_at_the_end() -> None:
    """When no more text comes, what was held back is text like any other."""
    finder = StopStringFinder(["stop"])
    assert finder.push("don't st") == "don't "
    assert finder.finish() == "st"
    assert finder.finish() == ""


def test_nothing_comes_after_a_match() -> None:
    """Text pushed after the match is ignored."""
    finder = StopStringFinder(["."])
    assert finder.push("a.b") == "a"
    assert finder.push("c") == ""
    assert finder.finish() == ""


def test_longest_stop_wins_where_two_end_together() -> None:
    """Of two stop strings complete at the same character the longer one is the match."""
    assert _run(["xab"], ["b", "ab"]) == ("x", "ab")


def test_without_stops_text_passes_at_once() -> None:
    """With no stop strings nothing is ever held back."""
    finder = StopStringFinder([])
    assert finder.push("anything") == "anything"


@given(text=SMALL_TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=6))
@pytest.mark.timeout(60)
def test_pieces_do_not_matter_and_a_naive_search_agrees(text: str, stops: list[str], cuts: list[int]) -> None:
    """However the text is cut, the outcome is that of a naive search over the whole text."""
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    assert _run(pieces, stops) == _find_naively(text, stops)
