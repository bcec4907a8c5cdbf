"""The rows of a cached decode layout that cross a page at the same step, and what such a step changes each time."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner_service.core.layout import Int32Array
from planner_service.core.page_tables import IntArray
from planner_service.core.rows import LayoutRows


class Crossing(NamedTuple):
    """Rows that need one more page at the same step; `page_size` steps later they do again.

    Args:
        rows: the rows, rising, intp [n].
        streams: their streams, intp [n].
        ordered_rows: the rows in the order in which they are given pages, intp [n].
        ordered_streams: their streams in that order, intp [n].
        slot_items: the items of a plan where their tokens' slots stand, intp [n].
        increments: what the step adds to a plan's items of fixed size, page crossings included, int32.
        added: how many of these rows stand at or before each row of the layout, int32 [num_rows].
        num_added: how many stand before the end of each plan label.
    """

    rows: IntArray
    streams: IntArray
    ordered_rows: IntArray
    ordered_streams: IntArray
    slot_items: IntArray
    increments: Int32Array
    added: Int32Array
    num_added: tuple[int, ...]


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
    ordered = places if page_ranks is None else places[np.argsort(page_ranks[places])]
    added = np.zeros(len(rows.streams), dtype=np.int32)
    added[all_rows] = 1
    np.cumsum(added, dtype=np.int32, out=added)
    increments = items.increments.copy()
    increments[items.lasts[places]] = 1 - page_size  # from a full page to one token
    num_added: list[int] = []
    for i, (first, end) in enumerate(items.kv_indptrs):
        of_label = added[rows.bounds[i] : rows.bounds[i + 1]]
        increments[first:end] = of_label
        if num_added:
            increments[first:end] -= num_added[-1]
        num_added.append(int(of_label[-1]))
    return Crossing(
        rows=all_rows,
        streams=rows.row_streams[places],
        ordered_rows=ordered if rows.stream_rows is None else rows.stream_rows[ordered],
        ordered_streams=rows.row_streams[ordered],
        slot_items=items.slots[places],
        increments=increments,
        added=added,
        num_added=tuple(num_added),
    )
