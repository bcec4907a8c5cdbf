"""Builds a plan from scratch: sizes first, then every array, written straight into a buffer set."""

from dataclasses import dataclass

import numpy as np

from planner_service.core.arrays import ArraysExtent, build_extents
from planner_service.core.layout import Int32Array
from planner_service.core.page_tables import IntArray, PageTables
from planner_service.core.rows import LayoutRows
from planner_service.errors import RegionUnavailableError

MAX_PLAN_INDICES = 1 << 29  # their bytes still fit the offsets of a set


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """How large the arrays of a plan are, all plan labels' rows one after another.

    Args:
        kv_lens: int32 [num_rows].
        num_pages: pages each row needs, int32 [num_rows].
        index_bounds: where each plan label's indices start among all, with the end.
        extents: where the arrays stand.
        num_bytes: the whole run.
    """

    kv_lens: Int32Array
    num_pages: Int32Array
    index_bounds: tuple[int, ...]
    extents: tuple[ArraysExtent, ...]
    num_bytes: int


def measure_plan(rows: LayoutRows, planned: Int32Array, page_size: int) -> PlanSizes:
    """Works out the lengths of a step and the sizes of its arrays.

    Args:
        rows: the layout.
        planned: planned length of each stream, index -1 (padding) is 0; int32.
        page_size: tokens a page holds.

    Raises:
        RegionUnavailableError: no buffer set can be that large.
    """
    kv_lens = planned[rows.streams] + rows.spans
    num_pages = -(-kv_lens // page_size)
    ends = np.cumsum(num_pages, dtype=np.int64)
    if ends[-1] > MAX_PLAN_INDICES:
        raise RegionUnavailableError(4 * int(ends[-1]), f"a plan of more than {MAX_PLAN_INDICES} page indices")
    index_bounds = (0, *(int(ends[bound - 1]) for bound in rows.bounds[1:]))
    sizes = [
        (label.name, rows.bounds[i + 1] - rows.bounds[i], rows.num_tokens[i], index_bounds[i + 1] - index_bounds[i])
        for i, label in enumerate(rows.layout.plan_labels)
    ]
    extents, num_bytes = build_extents(sizes)
    return PlanSizes(kv_lens, num_pages, index_bounds, extents, num_bytes)


def write_plan(rows: LayoutRows, sizes: PlanSizes, tables: PageTables, page_size: int, out: Int32Array) -> None:
    """Writes the arrays of a plan.

    Args:
        rows: the layout.
        sizes: from `measure_plan`.
        tables: page tables that hold at least the pages each row needs.
        page_size: tokens a page holds.
        out: the buffer set, int32, at least `sizes.num_bytes` long.

    Source: FlashInfer's page table layout (https://docs.flashinfer.ai/tutorials/kv_layout.html).
    """
    kv_lens, num_pages = sizes.kv_lens, sizes.num_pages
    last_page_lens = kv_lens - (np.maximum(num_pages, 1) - 1) * page_size
    starts = tables.starts[rows.streams]
    positions, slots = _build_tokens(rows, kv_lens, starts, tables.arena, page_size)
    indices = gather_indices(starts, num_pages, tables.arena)
    token = 0
    for i, extent in enumerate(sizes.extents):
        label_rows = slice(rows.bounds[i], rows.bounds[i + 1])
        label_tokens = slice(token, token + extent.num_tokens)
        token += extent.num_tokens
        qo_indptr, kv_indptr, kv_indices, last, kv, slot_mapping, position = views_of(extent, out)
        qo_indptr[0] = 0
        np.cumsum(rows.spans[label_rows], dtype=np.int32, out=qo_indptr[1:])
        kv_indptr[0] = 0
        np.cumsum(num_pages[label_rows], dtype=np.int32, out=kv_indptr[1:])
        kv_indices[:] = indices[sizes.index_bounds[i] : sizes.index_bounds[i + 1]]
        last[:] = last_page_lens[label_rows]
        kv[:] = kv_lens[label_rows]
        slot_mapping[:] = slots[label_tokens]
        position[:] = positions[label_tokens]


def views_of(extent: ArraysExtent, items: Int32Array) -> list[Int32Array]:
    """Returns the arrays of one plan label as views of a buffer set, in the order of `ARRAY_NAMES`."""
    rows, tokens = extent.num_rows, extent.num_tokens
    counts = (rows + 1, rows + 1, extent.num_indices, rows, rows, tokens, tokens)
    return [items[offset >> 2 : (offset >> 2) + count] for offset, count in zip(extent.offsets, counts, strict=True)]


def gather_indices(starts: IntArray, num_pages: Int32Array, arena: Int32Array) -> Int32Array:
    """Returns the first pages of tables one after another.

    Args:
        starts: where each table starts in the arena, intp [n].
        num_pages: how many pages of each, int32 [n].
        arena: the pages of all tables.

    Returns:
        int32 [sum of num_pages].
    """
    ends = np.cumsum(num_pages, dtype=np.intp)
    places = np.repeat(starts - (ends - num_pages), num_pages)
    places += np.arange(len(places))
    indices: Int32Array = arena[places]
    return indices


def _build_tokens(
    rows: LayoutRows, kv_lens: Int32Array, starts: IntArray, arena: Int32Array, page_size: int
) -> tuple[Int32Array, Int32Array]:
    """Returns positions and slots of every query token, both int32."""
    if rows.is_all_ones:
        positions: Int32Array = kv_lens - np.int32(1)
        token_starts = starts
    else:
        ends: Int32Array = np.cumsum(rows.spans, dtype=np.int32)
        first_positions: Int32Array = np.repeat(kv_lens - ends, rows.spans)
        tokens: Int32Array = np.arange(len(first_positions), dtype=np.int32)
        positions = first_positions + tokens
        token_starts = np.repeat(starts, rows.spans)
    pages = positions // page_size
    slots: Int32Array = arena[token_starts + pages] * np.int32(page_size) + (positions - pages * page_size)
    return positions, slots
