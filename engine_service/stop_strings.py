"""Finds stop strings in streamed text, across the borders of its pieces."""

from collections.abc import Sequence


class StopStringFinder:
    """Passes text through until a stop string has come, and holds back what could still become one.

    What comes out does not depend on how the text was cut into pieces: the first stop string to be complete ends it,
    and of several that are complete at the same character the longest.

    Args:
        stops: the stop strings, none of them empty.

    Attributes:
        matched: the stop string that came, or None.

    Source: one Knuth-Morris-Pratt automaton a stop string; its state is the length of the longest end of the text
        that begins the stop string, which is exactly what has to be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        # The longest first: it wins where two are complete at the same character.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_build_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str, *, is_armed: bool = True) -> str:
        """Takes the next piece of text.

        Args:
            text: the piece; ignored once a stop string has come.
            is_armed: whether a stop string that this piece completes counts; if not, it is text like any other.

        Returns:
            The text that is now certain to come before any stop string.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        for index, character in enumerate(text, start=len(self._held)):
            stop = self._advance(character)
            if stop is not None and is_armed:
                self.matched = stop
                self._held = ""
                return pending[: index + 1 - len(stop)]
        num_held = max(self._states)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def finish(self) -> str:
        """Returns the text that was held back: no more is coming."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        completed = None
        for number, stop in enumerate(self._stops):
            state = self._states[number]
            while state and stop[state] != character:
                state = self._failures[number][state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                completed = completed or stop
                state = self._failures[number][state - 1]
            self._states[number] = state
        return completed


def _build_failure_table(pattern: str) -> list[int]:
    """Returns for each prefix of `pattern` the length of its longest proper prefix that also ends it."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table
