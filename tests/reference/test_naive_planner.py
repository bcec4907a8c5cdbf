"""The naive reference against the handed plan vectors: two independent planners agree."""

import json
from pathlib import Path

import pytest

from planner_service.core.layout import StepLayout
from tests.reference.naive_planner import NaivePlanner, OutOfPages, build_decode_plan, pack_rows
from tests.reference.vector_replay import VectorReplay

VECTOR_FILES = sorted((Path(__file__).parents[1] / "vectors").glob("*.json"))


def test_there_are_vectors() -> None:
    """The handed vectors lie in tests/vectors."""
    assert VECTOR_FILES


@pytest.mark.parametrize("path", VECTOR_FILES, ids=lambda path: path.stem)
def test_naive_planner_makes_the_plans_of_the_vector(path: Path) -> None:
    """Every plan of a vector is made by the naive planner too, and reads what its streams hold."""
    VectorReplay(json.loads(path.read_text())).run()


def test_naive_planner_makes_the_example_of_the_design() -> None:
    """The worked example of the array definitions comes out as written there."""
    planner = NaivePlanner(page_size=4, num_pages=16)
    planner.plan(StepLayout(1, (pack_rows("main", [(0, 5), (1, 8)]),)))
    planner.commit(1)
    plan = planner.plan(StepLayout(2, (pack_rows("main", [(0, 1), (1, 1), (-1, 1)]),)))
    expected = {
        "qo_indptr": [0, 1, 2, 3],
        "paged_kv_indptr": [0, 2, 5, 6],
        "paged_kv_indices": [1, 2, 3, 4, 5, 0],
        "paged_kv_last_page_len": [2, 1, 1],
        "kv_lens": [6, 9, 1],
        "slot_mapping": [9, 20, 0],
        "positions": [5, 8, 0],
    }
    assert plan.arrays["main"] == expected
    assert build_decode_plan(4, [([1, 2], 5), ([3, 4, 5], 8)], num_padding=1) == expected


def test_a_refused_layout_changes_nothing() -> None:
    """A layout that needs more pages than are free names how many, and leaves the planner as it was."""
    planner = NaivePlanner(page_size=4, num_pages=4)
    planner.plan(StepLayout(1, (pack_rows("main", [(0, 5)]),)))
    with pytest.raises(OutOfPages) as refusal:
        planner.plan(StepLayout(2, (pack_rows("main", [(0, 4), (1, 9)]),)))
    assert refusal.value.num_short == 3  # one for stream 0 and three for stream 1, with one free
    assert list(planner.free) == [3]
    assert list(planner.streams) == [0]
    assert len(planner.streams[0].tokens) == 5
