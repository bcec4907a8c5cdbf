"""The counts that other tests rely on are those of known work."""

import numpy as np

from tests.bench.call_counts import count_calls, measure_bytes


def test_python_and_c_functions_are_counted() -> None:
    """A call of each kind is one; what does not call anything is nothing."""

    def call_both() -> None:
        def nothing() -> None:
            """Does nothing."""

        for _ in range(5):
            nothing()
            abs(-1)

    assert count_calls(lambda: None) == 0
    assert count_calls(call_both) == 10


def test_bytes_are_those_at_the_peak_and_those_that_stay() -> None:
    """An array that goes counts for the peak alone, numpy's memory included; one from before does not count."""
    kept: list[object] = [np.zeros(50_000, np.uint8)]

    def work() -> None:
        kept.clear()
        np.zeros(100_000, np.uint8)
        kept.append(np.zeros(10_000, np.uint8))

    peak, left = measure_bytes(lambda: None, work)
    assert 100_000 <= peak < 102_000
    assert 10_000 <= left < 12_000
