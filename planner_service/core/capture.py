"""A cache mismatch as a plan vector: a file that replays it against any planner (docs/conformance.md)."""

from collections.abc import Sequence
from typing import Any

from planner_service.core.arrays import ARRAY_NAMES, ArraysExtent
from planner_service.core.builder import views_of
from planner_service.core.layout import PADDING, Int32Array
from planner_service.core.plan import CaptureDocument, Mismatch
from planner_service.core.rows import LayoutRows
from planner_service.core.verify import PlacedArrays

MAX_STEPS = 64
# Tells a capture of a mismatch that was made on purpose.
DRILL_TAG = "drill"


def build_capture(
    rows: LayoutRows,
    *,
    page_size: int,
    num_pages: int,
    num_steps: int,
    mismatches: Sequence[Mismatch],
    cached: PlacedArrays,
    full: PlacedArrays,
    is_drill: bool = False,
) -> CaptureDocument:
    """Describes a mismatch so that it can be replayed from an empty session.

    Streams are prefilled to the length they had, then the layout is decoded as often as it was since its last full
    plan, `MAX_STEPS` times at most. Every row's (request, label) is its stream and its plan label.

    Args:
        rows: the layout.
        page_size: tokens a page holds.
        num_pages: pages in the pool, the sink page included.
        num_steps: how often the cached plan had been advanced, this time included.
        mismatches: where the plans differ.
        cached: the cached plan.
        full: the full plan.
        is_drill: whether the cached plan was made wrong on purpose.

    Returns:
        A plan vector, with `mismatches` and `cached` as further keys.
    """
    segments, padding = _build_segments(rows)
    expect = _build_expect(rows, *full)
    lengths = [
        (row, kv_len)
        for label in expect
        for row, kv_len in zip(label["rows"], label["kv_lens"], strict=True)
        if row is not None
    ]
    num_decodes = min(num_steps + 1, MAX_STEPS, *(kv_len for _, kv_len in lengths))
    step: CaptureDocument = {"op": "step", "combined": [], "commit": True, "then": "commit"}
    prefills = [(row, kv_len - num_decodes) for row, kv_len in lengths if kv_len > num_decodes]
    ops = [{**step, "padding": [], "segments": [[*row, span]]} for row, span in prefills]
    ops += [{**step, "padding": padding, "segments": segments} for _ in range(num_decodes)]
    ops[-1]["expect"] = expect
    return {
        "name": "capture",
        "note": "a cached plan differed from the full one; `expect` holds the full one",
        "tags": ["capture", *([DRILL_TAG] if is_drill else [])],
        "page_size": page_size,
        "num_pages": num_pages,
        "exact": False,
        "ops": ops,
        "mismatches": [
            {"label": item.plan_label, "array": item.array, "index": item.index, "row": item.row}
            | {"cached": item.cached, "full": item.full}
            for item in mismatches
        ],
        "cached": _build_expect(rows, *cached),
    }


def _build_segments(rows: LayoutRows) -> tuple[list[list[Any]], list[str]]:
    segments: list[list[Any]] = []
    padding: list[str] = []
    for i, label in enumerate(rows.layout.plan_labels):
        first, end = rows.bounds[i], rows.bounds[i + 1]
        for stream, span in zip(rows.streams[first:end].tolist(), rows.spans[first:end].tolist(), strict=True):
            request = f"stream-{stream}"
            if stream == PADDING:
                request = f"padding-{len(padding)}"
                padding.append(request)
            segments.append([request, label.name, span])
    return segments, padding


def _build_expect(rows: LayoutRows, extents: Sequence[ArraysExtent], items: Int32Array) -> list[CaptureDocument]:
    expect = []
    for i, extent in enumerate(extents):
        streams = rows.streams[rows.bounds[i] : rows.bounds[i + 1]].tolist()
        arrays = {name: view.tolist() for name, view in zip(ARRAY_NAMES, views_of(extent, items), strict=True)}
        label_rows = [None if stream == PADDING else [f"stream-{stream}", extent.name] for stream in streams]
        expect.append({"name": extent.name, "rows": label_rows, **arrays})
    return expect
