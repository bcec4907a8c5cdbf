"""Rules of waiting between attempts."""

import random

from engine_service.backoff import Backoff


def test_waits_double_up_to_the_longest_with_jitter_below() -> None:
    """Each wait is between half its limit and the limit, which doubles until it reaches the longest."""
    backoff = Backoff(0.5, 3.0, random.Random(1))
    for limit in (0.5, 1.0, 2.0, 3.0, 3.0):
        assert limit / 2 <= backoff.next_delay_seconds() <= limit


def test_two_engines_do_not_wait_equally_long() -> None:
    """Jitter spreads engines that lost the same planner."""
    waits = {Backoff(1.0, 8.0, random.Random(seed)).next_delay_seconds() for seed in range(5)}
    assert len(waits) == 5


def test_success_starts_over() -> None:
    """After a reset the first wait is short again."""
    backoff = Backoff(0.5, 60.0, random.Random(1))
    for _ in range(5_000):
        backoff.next_delay_seconds()
    backoff.reset()
    assert backoff.next_delay_seconds() <= 0.5
