"""Captures: a mismatch that the verify mode finds, as a plan vector that any planner can replay."""

import copy

import numpy as np
import pytest

from planner_service.core.arrays import ARRAY_NAMES
from planner_service.core.builder import views_of
from planner_service.core.layout import PlanLabelRows, StepLayout
from planner_service.core.plan import BuiltPlan, CacheMode, PlanSource
from planner_service.core.planner import Planner
from planner_service.core.ring import BufferSet
from tests.reference.naive_planner import pack_rows
from tests.reference.vector_replay import VectorReplay

PAGE_SIZE = 4
LABELS = (pack_rows("both", [(0, 1), (-1, 1), (1, 1)]), pack_rows("img", [(2, 1)]))


class VerifiedRun:
    """A planner in verify mode whose cached plan can be corrupted."""

    def __init__(self, first_lengths: tuple[int, int, int] = (9, 6, 5)) -> None:
        self.planner = Planner(page_size=PAGE_SIZE, num_pages=256, max_streams=3, cache_mode=CacheMode.VERIFY)
        self.step_id = 0
        self.plan((pack_rows("main", list(enumerate(first_lengths))),))

    def plan(self, labels: tuple[PlanLabelRows, ...] = LABELS) -> BuiltPlan:
        """Plans a step and commits it."""
        self.step_id += 1
        rows = self.planner.read(StepLayout(self.step_id, labels))
        plan = self.planner.plan(rows, self.step_id, lambda _: BufferSet(1, 0, np.zeros(4_096, np.int32)))
        self.planner.commit_through(self.step_id)
        return plan

    def corrupt(self, array: str, plan_label: int) -> None:
        """Adds one to the first value of an array of the cached plan."""
        assert self.planner.cache is not None
        entry = self.planner.cache.entries[0]
        if array == "paged_kv_indices":
            indices = np.array(entry._indices[plan_label])
            indices[0] += 1
            entry._indices[plan_label] = indices.data
        else:
            entry._fixed[entry.extents[plan_label].offsets[ARRAY_NAMES.index(array)] // 4] += 1


@pytest.mark.parametrize("array", ARRAY_NAMES)
def test_a_corrupted_cached_plan_is_found_named_and_not_served(array: str) -> None:
    """Whichever array is wrong, the mismatch names label, array, place and values; the full plan is served."""
    run, honest = VerifiedRun(), VerifiedRun()
    for _ in range(2):
        run.plan()
        honest.plan()
    run.corrupt(array, plan_label=0)
    plan, expected = run.plan(), honest.plan()
    assert plan.source is PlanSource.VERIFIED
    (mismatch,) = plan.mismatches
    assert (mismatch.plan_label, mismatch.array, mismatch.index, mismatch.row) == ("both", array, 0, 0)
    assert mismatch.cached == mismatch.full + 1
    for extent, other in zip(plan.extents, expected.extents, strict=True):
        served = [view.tolist() for view in views_of(extent, plan.buffer_set.items)]
        assert served == [view.tolist() for view in views_of(other, expected.buffer_set.items)]


def test_each_plan_label_with_a_mismatch_is_named_once() -> None:
    """Two wrong plan labels are two mismatches, in their order."""
    run = VerifiedRun()
    run.plan()
    run.corrupt("kv_lens", plan_label=0)
    run.corrupt("positions", plan_label=1)
    assert [(item.plan_label, item.array) for item in run.plan().mismatches] == [
        ("both", "kv_lens"),
        ("img", "positions"),
    ]


def test_after_a_mismatch_the_cache_goes_on_from_the_full_plan() -> None:
    """The corrupted entry is gone: the next step is verified without a mismatch."""
    run = VerifiedRun()
    run.plan()
    run.corrupt("kv_lens", plan_label=0)
    run.plan()
    plan = run.plan()
    assert (plan.source, plan.mismatches) == (PlanSource.VERIFIED, ())


@pytest.mark.parametrize("num_steps", [1, 3, 90])
def test_a_capture_replays_in_another_planner(num_steps: int) -> None:
    """The naive planner, fed the capture, makes the plan that was served; with the cached plan it does not."""
    run = VerifiedRun()
    for _ in range(num_steps):
        run.plan()
    run.corrupt("kv_lens", plan_label=0)
    capture = run.plan().capture
    assert capture is not None
    assert capture["mismatches"][0]["label"] == "both"
    _replay(capture)
    wrong = copy.deepcopy(capture)
    wrong["ops"][-1]["expect"] = capture["cached"]
    with pytest.raises(AssertionError):
        _replay(wrong)


def test_a_capture_of_streams_that_were_never_prefilled_replays() -> None:
    """Streams that began empty are decoded from their first token."""
    run = VerifiedRun(first_lengths=(0, 0, 0))
    run.plan()
    run.corrupt("slot_mapping", plan_label=1)
    capture = run.plan().capture
    assert capture is not None
    _replay(capture)


def _replay(vector: dict[str, object]) -> None:
    VectorReplay(vector).run()
