"""Waiting times between attempts."""

import random


class Backoff:
    """Waiting times that double from attempt to attempt, with jitter: engines that lost one planner spread out.

    Args:
        first_seconds: the longest first wait.
        max_seconds: the longest wait.
        random_source: where the jitter comes from.
    """

    def __init__(self, first_seconds: float, max_seconds: float, random_source: random.Random | None = None) -> None:
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self._random = random_source or random.Random()
        self._num_attempts = 0

    def next_delay_seconds(self) -> float:
        """Returns how long to wait before the next attempt: half to all of a limit that doubles each time."""
        # The exponent is bounded: a planner may be away for days.
        limit = min(self._max_seconds, self._first_seconds * 2.0 ** min(self._num_attempts, 32))
        self._num_attempts += 1
        return limit * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Starts over: an attempt has succeeded."""
        self._num_attempts = 0
