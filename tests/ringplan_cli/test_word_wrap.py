"""Streamed text at the edge of a terminal."""

import textwrap
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringplan_cli.word_wrap import WordWrapper


def wrap(parts: list[str], width: int) -> str:
    """Returns what is printed of a text that comes in parts."""
    wrapper = WordWrapper(width)
    return "".join(wrapper.add(part) for part in parts) + wrapper.finish()


@given(st.lists(st.text("ab", min_size=1, max_size=9), max_size=20), st.integers(10, 30))
def test_single_spaced_words_are_placed_as_textwrap_places_them(words: list[str], width: int) -> None:
    """A paragraph looks as the standard library would set it."""
    assert wrap([" ".join(words)], width) == textwrap.fill(" ".join(words), width)


@given(st.text("ab \n\t", max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_parts_make_no_difference(text: str, cuts: list[int]) -> None:
    """However the text is cut, the same is printed."""
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[start:end] for start, end in pairwise(borders)]
    assert wrap(parts, 12) == wrap([text], 12)


@given(st.text(max_size=60))
def test_only_white_space_changes(text: str) -> None:
    """No word is lost, doubled or changed."""
    assert wrap([text], 12).split() == text.split()


def test_text_that_fits_stays_as_it_is() -> None:
    """Indentation, tabs and empty lines of code and lists are kept."""
    text = "a:\n\n    - b  c\n    - d"
    assert wrap([text], 40) == text


@pytest.mark.parametrize(("word", "lines"), [("漢字漢字", "ab\n漢字漢字"), ("éèê", "ab éèê")])
def test_wide_characters_count_twice(word: str, lines: str) -> None:
    """Columns are counted, not characters."""
    assert wrap(["ab ", word], 8) == lines


def test_words_are_printed_as_soon_as_they_are_complete() -> None:
    """Only the last word waits."""
    wrapper = WordWrapper(80)
    assert wrapper.add("one tw") == "one"
    assert wrapper.add("o three") == " two"
    assert wrapper.finish() == " three"
