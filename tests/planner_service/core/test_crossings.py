"""Which rows cross a page at which step, and what that adds to a plan, against plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_service.core.crossings import DecodeItems, build_crossing, group_by_phase
from planner_service.core.layout import PlanLabelRows, StepLayout
from planner_service.core.rows import build_rows


@given(st.lists(st.integers(1, 200), max_size=20), st.integers(1, 20))
def test_rows_cross_when_their_token_is_the_first_of_a_page(kv_lens: list[int], page_size: int) -> None:
    """A row is in the group of a step if, and only if, its length then is one more than a multiple of a page."""
    groups = group_by_phase(np.array(kv_lens, dtype=np.int32), page_size)
    for step in range(page_size):
        expected = [row for row, kv_len in enumerate(kv_lens) if (kv_len + step - 1) % page_size == 0]
        assert groups.get(step, np.empty(0)).tolist() == expected


@pytest.mark.parametrize("page_order", [(), (5, 2, 0, 4, 1, 3)])
def test_a_crossing_counts_its_rows_label_by_label_padding_aside(page_order: tuple[int, ...]) -> None:
    """Rows, the order of pages and what is added to `paged_kv_indptr` are those of a layout with padding between."""
    labels = (
        PlanLabelRows("main", np.array([4, -1, 7], "<i4").tobytes(), b""),
        PlanLabelRows("cfg_text", np.array([-1, 2, 5], "<i4").tobytes(), b""),
    )
    rows = build_rows(StepLayout(1, labels, page_order=np.array(page_order, "<i4").tobytes()), max_streams=8)
    items = DecodeItems(
        lasts=np.array([10, 11, 12, 13]),
        slots=np.array([20, 21, 22, 23]),
        increments=np.ones(30, dtype=np.int32),
        kv_indptrs=((0, 3), (5, 8)),
    )
    ranks = None if rows.page_order is None else np.argsort(rows.page_order)
    crossing = build_crossing(rows, items, np.array([0, 2, 3]), ranks, page_size=16)

    assert crossing.growth.streams.tolist() == ([5, 4, 2] if page_order else [4, 2, 5])
    assert crossing.ordered_rows.tolist() == ([5, 0, 4] if page_order else [0, 4, 5])
    in_rows = crossing.ordered_rows if crossing.places is None else crossing.ordered_rows[crossing.places]
    assert in_rows.tolist() == [0, 4, 5]
    assert crossing.slot_items.tolist() == [20, 22, 23]
    assert crossing.end_items.tolist() == [0, 6, 7]
    assert crossing.bounds == (0, 1, 3)
    expected = [1] * 30
    expected[0:3] = [1, 1, 1]
    expected[5:8] = [0, 1, 2]
    for place in (10, 12, 13):
        expected[place] = -15
    assert crossing.increments.tolist() == expected
