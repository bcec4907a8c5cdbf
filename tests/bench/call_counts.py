"""Counts what code does instead of timing it: the same on every machine."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_calls(work: Callable[[], object]) -> int:
    """Returns how many functions `work` calls in this thread, Python's and C's, itself left out."""
    num_calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    gc.disable()  # a collection would call whatever finalizers have to be called
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return num_calls - 2  # `work` and the `setprofile` that ends it


def measure_bytes(warm_up: Callable[[], object], work: Callable[[], object]) -> tuple[int, int]:
    """Returns how many bytes `work` allocates at most beyond what there was, and how many are left after it.

    Args:
        warm_up: what comes before it; only memory that this allocates counts as freed if `work` frees it.
        work: what is measured.
    """
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        warm_up()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    return peak - before, after - before
