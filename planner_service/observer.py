"""What a session tells whoever watches it."""

from collections.abc import Sequence
from typing import Protocol

from planner_service.core.plan import BuiltPlan, CaptureDocument, Mismatch
from planner_service.errors import LayoutError
from planner_service.messages import PlanSource, WaitKind


class SessionObserver(Protocol):
    """Is told what happens in a session; every method is cheap."""

    def plan_published(self, source: PlanSource, plan_labels: Sequence[str], seconds: float) -> None:
        """A plan was made in so many seconds."""

    def cache_missed(self, plan_labels: Sequence[str], reason: str) -> None:
        """The cache had no plan for a layout, for this reason."""

    def cache_mismatched(self, mismatch: Mismatch) -> None:
        """A cached plan differed from the full one in one plan label; the full one was served."""

    def mismatch_drilled(self) -> None:
        """The mismatch told of last was made on purpose."""

    def mismatch_captured(self, capture: CaptureDocument) -> None:
        """A mismatch was described as a plan vector."""

    def layout_failed(self, error: LayoutError) -> None:
        """A layout has no plan."""

    def ring_waited(self, kind: WaitKind, seconds: float) -> None:
        """A step waited so many seconds for a buffer set."""

    def steps_discarded(self, num_steps: int) -> None:
        """Planned steps were discarded."""

    def region_grown(self) -> None:
        """A larger region was made."""


def report_plan(observer: SessionObserver, plan: BuiltPlan, seconds: float) -> None:
    """Tells of a plan that was made in so many seconds, and of how the cache fared with it."""
    plan_labels = [extent.name for extent in plan.extents]
    observer.plan_published(plan.source, plan_labels, seconds)
    if plan.miss_reason is not None:
        observer.cache_missed(plan_labels, plan.miss_reason.value)
    for mismatch in plan.mismatches:
        observer.cache_mismatched(mismatch)
    if plan.capture is not None:
        if plan.is_drill:
            observer.mismatch_drilled()
        observer.mismatch_captured(plan.capture)
