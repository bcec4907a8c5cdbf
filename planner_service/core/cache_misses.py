"""Why the plan cache had no plan for a layout, and how often it had one."""

from dataclasses import dataclass, field

import numpy as np

from planner_service.core.layout import PADDING
from planner_service.core.page_tables import IntArray
from planner_service.core.plan import MissReason
from planner_service.core.rows import LayoutRows


@dataclass(slots=True)
class CacheTally:
    """How the cache fared, in a session or with one layout.

    Args:
        num_hits: plans made from a cached one.
        num_mismatches: cached plans that were wrong.
        misses: plans made from scratch, by why; reasons that never came up are not in it.
    """

    num_hits: int = 0
    num_mismatches: int = 0
    misses: dict[MissReason, int] = field(default_factory=dict)

    def count_miss(self, reason: MissReason) -> None:
        """Counts a plan made from scratch."""
        self.misses[reason] = self.misses.get(reason, 0) + 1


def compare_layouts(rows: LayoutRows, other: LayoutRows) -> MissReason:
    """Returns what differs between a layout and the one planned last.

    Args:
        rows: the layout.
        other: the one planned last.
    """
    names = [label.name for label in rows.layout.plan_labels]
    if names != [label.name for label in other.layout.plan_labels]:
        return MissReason.LABELS
    mine, theirs = _streams_by_label(rows), _streams_by_label(other)
    if all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True)):
        return MissReason.PADDING
    same_streams = np.array_equal(np.sort(np.concatenate(mine)), np.sort(np.concatenate(theirs)))
    same_grouping = all(np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(mine, theirs, strict=True))
    return MissReason.LABELS if same_streams and not same_grouping else MissReason.ROWS


def _streams_by_label(rows: LayoutRows) -> list[IntArray]:
    labels = [rows.streams[start:end] for start, end in zip(rows.bounds, rows.bounds[1:], strict=False)]
    return [streams[streams != PADDING] for streams in labels]
