"""Distributions of lengths are what their text says, and follow the seed."""

import re

import numpy as np
import pytest

from ringplan_cli.load.lengths import MAX_LENGTH, parse_lengths

NUM_DRAWS = 20_000


def draw(text: str, num_draws: int = NUM_DRAWS, seed: int = 1) -> np.ndarray:
    """Draws lengths."""
    random, lengths = np.random.default_rng(seed), parse_lengths(text)
    return np.array([lengths.draw(random) for _ in range(num_draws)])


@pytest.mark.parametrize("text", ["64", "fixed:64"])
def test_fixed_lengths_are_all_the_same(text: str) -> None:
    """A bare number is a fixed length too."""
    assert set(draw(text, 100)) == {64}
    assert str(parse_lengths(text)) == "fixed:64"


def test_uniform_lengths_take_every_value_equally_often() -> None:
    """Both ends belong to it; each of ten values has its tenth, within five standard deviations."""
    values, counts = np.unique(draw("uniform:3-12"), return_counts=True)
    assert values.tolist() == list(range(3, 13))
    expected = NUM_DRAWS / 10
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected * 0.9)


def test_lognormal_lengths_have_their_median_and_spread() -> None:
    """The logarithm has mean log(median) and standard deviation sigma, rounding and chance aside."""
    logarithms = np.log(draw("lognormal:300,0.5"))
    assert logarithms.mean() == pytest.approx(np.log(300), abs=5 * 0.5 / np.sqrt(NUM_DRAWS))
    assert logarithms.std() == pytest.approx(0.5, abs=0.015)


def test_lognormal_lengths_stop_at_the_most_that_is_given() -> None:
    """What lies beyond becomes the most; nothing is below 1."""
    lengths = draw("lognormal:2,3,64")
    assert lengths.min() == 1
    assert lengths.max() == 64
    # Above 64 lies what is more than log(32) / 3 = 1.155 standard deviations up: 12.4 %.
    assert (lengths == 64).mean() == pytest.approx(0.124, abs=0.015)


def test_lognormal_lengths_without_a_limit_stay_numbers() -> None:
    """However long the tail, a length is one that a message can hold."""
    assert draw("lognormal:1000,10", 2_000).max() <= MAX_LENGTH


def test_mixed_lengths_take_each_part_by_its_weight() -> None:
    """Weights are shares of their sum."""
    lengths = draw("fixed:8@3+uniform:100-101@1")
    assert set(lengths) == {8, 100, 101}
    assert (lengths == 8).mean() == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize(
    "text", ["fixed:8", "uniform:1-9", "lognormal:64,0.8", "lognormal:64,0.8,512", "fixed:8@0.75+lognormal:64,0.8@0.25"]
)
def test_text_of_a_distribution_reads_as_the_same(text: str) -> None:
    """What a report prints can be given again."""
    assert str(parse_lengths(text)) == text
    assert draw(text, 50).tolist() == draw(str(parse_lengths(text)), 50).tolist()


def test_same_seed_draws_the_same_lengths() -> None:
    """And another seed others."""
    assert draw("uniform:1-999", 20).tolist() == draw("uniform:1-999", 20).tolist()
    assert draw("uniform:1-999", 20).tolist() != draw("uniform:1-999", 20, seed=2).tolist()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "write fixed:N"),
        ("gauss:1,2", "write fixed:N"),
        ("uniform:9", "write fixed:N"),
        ("fixed:-3", "write fixed:N"),
        ("lognormal:nan,1", "write fixed:N"),
        ("fixed:0", "a length is 1 to 16,777,216"),
        ("fixed:99999999999999999999", "a length is 1 to 16,777,216"),
        ("uniform:9-3", "the smallest length comes first"),
        ("lognormal:0.5,1", "the median is 1 to 16,777,216"),
        ("lognormal:5,11", "sigma is 0 to 10"),
        ("fixed:8+fixed:9", "needs a weight above 0"),
        ("fixed:8@0+fixed:9@1", "needs a weight above 0"),
        ("fixed:8@x", "needs a weight above 0"),
    ],
)
def test_text_that_is_no_distribution_is_refused_with_the_rule(text: str, rule: str) -> None:
    """The message has the part at fault and what is allowed."""
    with pytest.raises(ValueError, match=re.escape(rule)):
        parse_lengths(text)
