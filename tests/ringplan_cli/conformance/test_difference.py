"""Differences: the first one is found, wherever it is, and reads as one line."""

import numpy as np
import pytest

from planner_service.client import Plan, PlanSource
from ringplan_cli.conformance.difference import NOTHING, Difference, find_difference
from ringplan_cli.conformance.vector import ExpectedLabel
from tests.ringplan_cli.conformance.hand_arrays import build_arrays

ARRAYS: dict[str, list[int]] = {
    "qo_indptr": [0, 1, 2, 3],
    "paged_kv_indptr": [0, 2, 5, 6],
    "paged_kv_indices": [1, 2, 3, 4, 5, 0],
    "paged_kv_last_page_len": [2, 1, 1],
    "kv_lens": [6, 9, 1],
    "slot_mapping": [9, 20, 0],
    "positions": [5, 8, 0],
}
ROWS = (("a", "main"), ("b", "main"), None)
NO_COPIES = np.zeros((0, 2), dtype=np.int32)


def _plan(name: str = "main") -> Plan:
    labels = {name: build_arrays(name, ROWS, **ARRAYS)}
    return Plan(1, PlanSource.FULL, labels, NO_COPIES, NO_COPIES, 1, np.zeros(0, dtype=np.uint8), 0, 0)


def _expect(**changes: object) -> list[ExpectedLabel]:
    arrays = {name: tuple(values) for name, values in ARRAYS.items()}
    return [ExpectedLabel(**{"name": "main", "rows": ROWS, **arrays, **changes})]  # type: ignore[arg-type]


def test_equal_plan_has_no_difference() -> None:
    """Rows and all arrays as expected."""
    assert find_difference(_plan(), _expect(), is_exact=True) is None


@pytest.mark.parametrize("array", ARRAYS)
def test_every_number_of_every_array_counts(array: str) -> None:
    """Wherever one number is another, that place is found, with both numbers."""
    for index, value in enumerate(ARRAYS[array]):
        values = list(ARRAYS[array])
        values[index] += 7
        found = find_difference(_plan(), _expect(**{array: tuple(values)}), is_exact=True)
        assert found == Difference(array, index, value + 7, value, "main")


@pytest.mark.parametrize("array", ARRAYS)
def test_array_of_another_length_differs_at_its_end(array: str) -> None:
    """Beyond the end of the shorter one there is nothing."""
    values = ARRAYS[array]
    found = find_difference(_plan(), _expect(**{array: (*values, 5)}), is_exact=True)
    assert found == Difference(array, len(values), 5, NOTHING, "main")
    found = find_difference(_plan(), _expect(**{array: tuple(values[:-1])}), is_exact=True)
    assert found == Difference(array, len(values) - 1, NOTHING, values[-1], "main")


@pytest.mark.parametrize("array", ["paged_kv_indices", "slot_mapping"])
def test_page_numbers_count_only_where_the_vector_is_exact(array: str) -> None:
    """A file that is not exact leaves page numbers to the planner."""
    other = tuple(value + 1 for value in ARRAYS[array])
    assert find_difference(_plan(), _expect(**{array: other}), is_exact=False) is None


@pytest.mark.parametrize(
    ("rows", "index"),
    [((("b", "main"), ("a", "main"), None), 0), ((("a", "main"), ("b", "cfg"), None), 1), (ROWS[:2], 2)],
)
def test_rows_count(rows: object, index: int) -> None:
    """Another request, another label, another order or a missing padding row is a difference."""
    found = find_difference(_plan(), _expect(rows=rows), is_exact=False)
    assert found is not None
    assert (found.array, found.index) == ("rows", index)


def test_names_of_plan_labels_come_first() -> None:
    """Another name is the difference, and the arrays are not looked at."""
    found = find_difference(_plan("other"), _expect(kv_lens=(0, 0, 0)), is_exact=True)
    assert found == Difference("plan_labels", 0, "main", "other")


@pytest.mark.parametrize(
    ("difference", "line"),
    [
        (
            Difference("slot_mapping", 3, 53, 54, "both", 6, "step"),
            "f.json / op 6 step / both / slot_mapping / 3 / want 53 / got 54",
        ),
        (
            Difference("rows", 1, ("a", "main"), None, "main", 0, "plan_ahead"),
            "f.json / op 0 plan_ahead / main / rows / 1 / want a.main / got padding",
        ),
        (Difference("num_free_pages", None, 127, 126), "f.json / end / - / num_free_pages / - / want 127 / got 126"),
    ],
)
def test_difference_is_one_line_of_seven_parts(difference: Difference, line: str) -> None:
    """File, operation, label, array, index, want and got, with a dash for what does not apply."""
    assert difference.write("f.json") == line
