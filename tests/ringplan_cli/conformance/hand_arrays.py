"""Plan arrays made by hand."""

import numpy as np

from planner_service.client import ARRAY_NAMES, ArraysExtent, PlanArrays

Rows = tuple[tuple[str, str] | None, ...]


def build_arrays(name: str, rows: Rows, **arrays: list[int]) -> PlanArrays:
    """Returns the arrays of a plan label.

    Args:
        name: the plan label.
        rows: its rows.
        arrays: every array by name.
    """
    values = {array: np.array(arrays[array], dtype=np.int32) for array in ARRAY_NAMES}
    extent = ArraysExtent(name, len(rows), len(arrays["positions"]), len(arrays["paged_kv_indices"]), (0,) * 7)
    return PlanArrays(name, rows, extent=extent, **values)


def build_row(
    row: tuple[str, str] | None, *, pages: list[int], length: int, span: int, page_size: int = 4, name: str = "main"
) -> PlanArrays:
    """Returns the arrays of a plan label with one row, as the definitions of the arrays have them.

    Args:
        row: the row; None is a padding row.
        pages: its pages.
        length: its tokens, those of this step included.
        span: its tokens of this step.
        page_size: tokens a page holds.
        name: the plan label.
    """
    positions = list(range(length - span, length))
    return build_arrays(
        name,
        (row,),
        qo_indptr=[0, span],
        paged_kv_indptr=[0, len(pages)],
        paged_kv_indices=pages,
        paged_kv_last_page_len=[(length - 1) % page_size + 1 if length else 0],
        kv_lens=[length],
        slot_mapping=[pages[place // page_size] * page_size + place % page_size for place in positions],
        positions=positions,
    )
