"""The rows of a cached decode layout that cross a page at the same step, and what such a step changes each time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner_service.core.layout import Int32Array
from planner_service.core.lead import Growth
from planner_service.core.page_tables import IntArray
from planner_service.core.rows import LayoutRows


class Crossing(NamedTuple):
    """Rows that need one more page at the same step; `page_size` steps later they do again.

    Args:
        growth: their streams, in the order in which they are given pages.
        ordered_rows: the rows in that order, intp [n].
        places: the place in that order of each row, rows rising, intp [n]; None if the two orders are one.
        end_items: the items of a plan where their `paged_kv_indptr` ends stand, rows rising, intp [n].
        slot_items: the items where their tokens' slots stand, intp [n].
        bounds: where each plan label's rows start among these, with the end.
        increments: what the step adds to a plan's items of fixed size, page crossings included, int32.
    """

    growth: Growth
    ordered_rows: IntArray
    places: IntArray | None
    end_items: IntArray
    slot_items: IntArray
    bounds: tuple[int, ...]
    increments: Int32Array


@dataclass(frozen=True, slots=True)
class DecodeItems:
    """Where a decode plan's items stand that a step changes.

    Args:
        lasts: `paged_kv_last_page_len` of each stream row, intp [num_stream_rows].
        slots: `slot_mapping` of each stream row's token, intp [num_stream_rows].
        increments: what a step without a crossing adds to the items of fixed size, int32.
        kv_indptrs: the first and the end of each plan label's `paged_kv_indptr`, without the 0 it begins with.
    """

    lasts: IntArray
    slots: IntArray
    increments: Int32Array
    kv_indptrs: tuple[tuple[int, int], ...]


def group_by_phase(kv_lens: Int32Array, page_size: int) -> dict[int, IntArray]:
    """Returns which rows cross a page at which step.

    Args:
        kv_lens: the rows' kv lengths at step 0, each at least 1, int32 [n].
        page_size: tokens a page holds.

    Returns:
        By step, modulo `page_size`, the places of the rows whose token is the first of a page then, rising.
    """
    phases = (1 - kv_lens) % page_size
    order = np.argsort(phases, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(phases[order])) + 1)
    return {int(phases[group[0]]): group for group in groups if len(group)}


def build_crossing(
    rows: LayoutRows, items: DecodeItems, places: IntArray, page_ranks: IntArray | None, page_size: int
) -> Crossing:
    """Returns what the crossing of some rows changes.

    Args:
        rows: the layout.
        items: where its plans' items stand.
        places: the crossing rows' places among the stream rows, rising, intp [n].
        page_ranks: when each stream row is given pages, intp [num_stream_rows], or None for in their own order.
        page_size: tokens a page holds.
    """
    all_rows = places if rows.stream_rows is None else rows.stream_rows[places]
    order = None if page_ranks is None else np.argsort(page_ranks[places])
    ordered = places if order is None else places[order]
    added = np.zeros(len(rows.streams), dtype=np.int32)
    added[all_rows] = 1
    increments = items.increments.copy()
    increments[items.lasts[places]] = 1 - page_size  # from a full page to one token
    bounds = np.searchsorted(all_rows, rows.bounds).tolist()
    end_items = []
    for i, (first, end) in enumerate(items.kv_indptrs):
        np.cumsum(added[rows.bounds[i] : rows.bounds[i + 1]], dtype=np.int32, out=increments[first:end])
        end_items.append(all_rows[bounds[i] : bounds[i + 1]] + (first - rows.bounds[i]))
    return Crossing(
        growth=Growth(rows.row_streams[ordered]),
        ordered_rows=ordered if rows.stream_rows is None else rows.stream_rows[ordered],
        places=None if order is None else np.argsort(order),
        end_items=np.concatenate(end_items),
        slot_items=items.slots[places],
        bounds=tuple(bounds),
        increments=increments,
    )


def splice(indices: "memoryview[int]", ends: Sequence[int], pages: "memoryview[int]") -> "memoryview[int]":
    """Returns `indices` with `pages[i]` inserted before what stood at `ends[i]` (rising)."""
    parts: list[memoryview[int]] = []
    previous = 0
    for i, end in enumerate(ends):
        parts += (indices[previous:end], pages[i : i + 1])
        previous = end
    parts.append(indices[previous:])
    return memoryview(b"".join(parts)).cast("i")
