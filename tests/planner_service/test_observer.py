"""What a session's observer is told of a plan."""

import numpy as np
import pytest

from planner_service.core.arrays import ArraysExtent
from planner_service.core.plan import BuiltPlan, Mismatch, MissReason, PlanSource
from planner_service.core.ring import BufferSet
from planner_service.observer import report_plan
from tests.planner_service.mirrored_session import RecordingObserver

PLAN = BuiltPlan(
    BufferSet(1, 0, np.zeros(4, np.int32)),
    (ArraysExtent("main", 1, 1, 1, (0,) * 7), ArraysExtent("cfg_text", 1, 1, 1, (0,) * 7)),
    num_bytes=16,
)
MISMATCH = Mismatch("main", "kv_lens", index=0, row=0, cached=7, full=6)


def test_a_plan_is_told_of_with_all_its_plan_labels() -> None:
    """A plan that hit or needed no cache is published and nothing else."""
    observer = RecordingObserver()
    report_plan(observer, PLAN, 0.5)
    assert observer.published == [(PlanSource.FULL, ("main", "cfg_text"))]
    assert (observer.misses, observer.mismatches, observer.captures) == ([], [], [])


def test_a_miss_is_told_with_its_reason() -> None:
    """By the word that metrics and logs use."""
    observer = RecordingObserver()
    report_plan(observer, PLAN._replace(miss_reason=MissReason.STREAM_CHANGED), 0.5)
    assert observer.misses == [(("main", "cfg_text"), "stream_changed")]


@pytest.mark.parametrize("is_drill", [False, True])
def test_only_a_mismatch_made_on_purpose_is_told_of_as_a_drill(is_drill: bool) -> None:
    """A real one is never taken for a drill."""
    observer = RecordingObserver()
    capture = {"name": "capture"}
    plan = PLAN._replace(source=PlanSource.VERIFIED, mismatches=(MISMATCH,), capture=capture, is_drill=is_drill)
    report_plan(observer, plan, 0.5)
    assert (observer.mismatches, observer.captures) == ([MISMATCH], [capture])
    assert observer.num_drilled == int(is_drill)
