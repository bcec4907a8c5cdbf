"""What a plan is and how it came to be."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from planner_service.core.arrays import ArraysExtent
from planner_service.core.ring import BufferSet

CaptureDocument = dict[str, Any]
PageCopies = list[tuple[int, int]]  # (source page, target page)


class CacheMode(Enum):
    """How a session uses the decode plan cache."""

    OFF = 0
    ON = 1
    VERIFY = 2


class PlanSource(Enum):
    """How a plan came to be."""

    FULL = 1
    CACHED = 2
    VERIFIED = 3


class MissReason(Enum):
    """Why the cache had no plan for a layout."""

    COLD = "cold"
    ROWS = "rows"
    LABELS = "labels"
    PADDING = "padding"
    STREAM_CHANGED = "stream_changed"
    DISCARDED = "discarded"
    NOT_DECODE = "not_decode"
    NOT_COMMITTING = "not_committing"
    FORK = "fork"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first place where a cached plan differs from the full one in one plan label.

    Args:
        plan_label: the plan label.
        array: the array's name.
        index: the place in it; -1 if the lengths differ, and the values are the lengths then.
        row: the row it belongs to, or -1.
        cached: the cached plan's value.
        full: the full plan's value.
    """

    plan_label: str
    array: str
    index: int
    row: int
    cached: int
    full: int


class BuiltPlan(NamedTuple):
    """A plan, written whole.

    Args:
        buffer_set: where.
        extents: where the arrays stand in it.
        num_bytes: the whole run.
        source: how it came to be.
        copies_before: pages to copy before the step, in order.
        copies_after: pages to copy after it, in order.
        miss_reason: why the cache had no plan, or None.
        mismatches: where the cached plan differed; the full one was served.
        capture: the mismatch as a plan vector, if there was one.
        is_drill: whether the mismatch was made on purpose.
    """

    buffer_set: BufferSet
    extents: tuple[ArraysExtent, ...]
    num_bytes: int
    source: PlanSource = PlanSource.FULL
    copies_before: tuple[tuple[int, int], ...] = ()
    copies_after: tuple[tuple[int, int], ...] = ()
    miss_reason: MissReason | None = None
    mismatches: tuple[Mismatch, ...] = ()
    capture: CaptureDocument | None = None
    is_drill: bool = False
