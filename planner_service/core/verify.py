"""Compares a cached plan with the full one."""

from collections.abc import Sequence

import numpy as np

from planner_service.core.arrays import ARRAY_NAMES, ArraysExtent
from planner_service.core.builder import views_of
from planner_service.core.layout import Int32Array
from planner_service.core.plan import Mismatch

PlacedArrays = tuple[Sequence[ArraysExtent], Int32Array]  # where a plan's arrays stand, and the set they stand in


def find_mismatches(cached: PlacedArrays, full: PlacedArrays) -> tuple[Mismatch, ...]:
    """Compares every array of two plans of one layout.

    Args:
        cached: the cached plan.
        full: the full plan.

    Returns:
        The first mismatch of each plan label that has one.
    """
    mismatches = []
    for cached_extent, full_extent in zip(cached[0], full[0], strict=True):
        mismatch = _compare_label(cached_extent, cached[1], full_extent, full[1])
        if mismatch is not None:
            mismatches.append(mismatch)
    return tuple(mismatches)


def _compare_label(
    cached_extent: ArraysExtent, cached: Int32Array, full_extent: ArraysExtent, full: Int32Array
) -> Mismatch | None:
    label = full_extent.name
    full_views = views_of(full_extent, full)
    for name, got, want in zip(ARRAY_NAMES, views_of(cached_extent, cached), full_views, strict=True):
        if len(got) != len(want):
            return Mismatch(label, name, -1, -1, len(got), len(want))
        is_other = got != want
        if is_other.any():
            index = int(np.flatnonzero(is_other)[0])
            return Mismatch(label, name, index, _row_of(name, index, full_views), int(got[index]), int(want[index]))
    return None


def _row_of(name: str, index: int, views: Sequence[Int32Array]) -> int:
    """Returns the row that an element of an array belongs to."""
    if name in ("slot_mapping", "positions"):
        return int(np.searchsorted(views[ARRAY_NAMES.index("qo_indptr")], index, side="right")) - 1
    if name == "paged_kv_indices":
        return int(np.searchsorted(views[ARRAY_NAMES.index("paged_kv_indptr")], index, side="right")) - 1
    return max(index - 1, 0) if name.endswith("indptr") else index
