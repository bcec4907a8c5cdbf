"""Distributions of prompt and answer lengths, written as people give them on the command line."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

MAX_LENGTH = 1 << 24
MAX_SIGMA = 10.0
SYNTAX = (
    "fixed:N, uniform:LOW-HIGH, lognormal:MEDIAN,SIGMA or lognormal:MEDIAN,SIGMA,MOST; "
    "several mixed by weight as fixed:32@0.8+uniform:200-400@0.2"
)

_COUNT = r"(\d+)"
_REAL = r"(\d+(?:\.\d*)?|\.\d+)"
_PATTERNS = {
    "fixed": re.compile(rf"(?:fixed:)?{_COUNT}"),
    "uniform": re.compile(rf"uniform:{_COUNT}-{_COUNT}"),
    "lognormal": re.compile(rf"lognormal:{_REAL},{_REAL}(?:,{_COUNT})?"),
}


class Lengths(ABC):
    """A distribution of lengths in tokens, each 1 or more. `str` gives back what `parse_lengths` takes."""

    @abstractmethod
    def draw(self, random: np.random.Generator) -> int:
        """Draws one length.

        Args:
            random: where chance comes from.
        """


class FixedLengths(Lengths):
    """The same length each time.

    Args:
        length: it.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def draw(self, random: np.random.Generator) -> int:  # noqa: ARG002  # As the base class has it.
        """Returns the length."""
        return self._length

    def __str__(self) -> str:
        return f"fixed:{self._length}"


class UniformLengths(Lengths):
    """Every length from `low` to `high` equally often.

    Args:
        low: the smallest.
        high: the largest.
    """

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    def draw(self, random: np.random.Generator) -> int:
        """Draws one length."""
        return int(random.integers(self._low, self._high, endpoint=True))

    def __str__(self) -> str:
        return f"uniform:{self._low}-{self._high}"


class LognormalLengths(Lengths):
    """Many short ones and a long tail, as conversations have them: the logarithm is normally distributed.

    Args:
        median: half of the lengths are below it.
        sigma: standard deviation of the natural logarithm; two thirds lie within a factor of e^sigma of the median.
        most: longer ones become this; None for no limit.
    """

    def __init__(self, median: float, sigma: float, most: int | None) -> None:
        self._median, self._sigma, self._most = median, sigma, most

    def draw(self, random: np.random.Generator) -> int:
        """Draws one length."""
        length = round(min(self._median * float(np.exp(self._sigma * random.standard_normal())), MAX_LENGTH))
        return max(1, length if self._most is None else min(length, self._most))

    def __str__(self) -> str:
        most = "" if self._most is None else f",{self._most}"
        return f"lognormal:{self._median:g},{self._sigma:g}{most}"


class MixedLengths(Lengths):
    """Each length is drawn from one of several distributions.

    Args:
        parts: the distributions.
        weights: how often each is taken; their sum need not be 1.
    """

    def __init__(self, parts: Sequence[Lengths], weights: Sequence[float]) -> None:
        self._parts, self._weights = tuple(parts), tuple(weights)
        self._shares = np.cumsum(weights) / np.sum(weights)

    def draw(self, random: np.random.Generator) -> int:
        """Draws one length."""
        part = int(np.searchsorted(self._shares, random.random(), side="right"))
        return self._parts[min(part, len(self._parts) - 1)].draw(random)

    def __str__(self) -> str:
        return "+".join(f"{part}@{weight:g}" for part, weight in zip(self._parts, self._weights, strict=True))


def parse_lengths(text: str) -> Lengths:
    """Reads a distribution.

    Args:
        text: in the form that `SYNTAX` says.

    Returns:
        The distribution.

    Raises:
        ValueError: the text is nothing of that kind, or a figure is out of range.
    """
    parts = [part.strip().partition("@") for part in text.split("+")]
    if len(parts) == 1 and not parts[0][1]:
        return _parse_part(parts[0][0])
    weights = [_parse_weight(weight, part) for part, _, weight in parts]
    return MixedLengths([_parse_part(part) for part, _, _ in parts], weights)


def _parse_part(text: str) -> Lengths:
    matches = {name: pattern.fullmatch(text.strip()) for name, pattern in _PATTERNS.items()}
    if match := matches["fixed"]:
        return FixedLengths(_check_length(text, match[1]))
    if match := matches["uniform"]:
        low, high = _check_length(text, match[1]), _check_length(text, match[2])
        if low > high:
            _refuse(text, "the smallest length comes first")
        return UniformLengths(low, high)
    if match := matches["lognormal"]:
        median, sigma = float(match[1]), float(match[2])
        if not 1 <= median <= MAX_LENGTH:
            _refuse(text, f"the median is 1 to {MAX_LENGTH:,}")
        if sigma > MAX_SIGMA:
            _refuse(text, f"sigma is 0 to {MAX_SIGMA:g}")
        return LognormalLengths(median, sigma, None if match[3] is None else _check_length(text, match[3]))
    raise ValueError(f"{text.strip()!r}: write {SYNTAX}")


def _check_length(text: str, digits: str) -> int:
    if len(digits) > len(str(MAX_LENGTH)) or not 1 <= int(digits) <= MAX_LENGTH:
        _refuse(text, f"a length is 1 to {MAX_LENGTH:,}")
    return int(digits)


def _parse_weight(text: str, part: str) -> float:
    if not re.fullmatch(_REAL, text) or not 0 < float(text) < np.inf:
        _refuse(part, f"a mixed distribution needs a weight above 0 after '@', not {text!r}")
    return float(text)


def _refuse(text: str, rule: str) -> NoReturn:
    raise ValueError(f"{text.strip()!r}: {rule}")
