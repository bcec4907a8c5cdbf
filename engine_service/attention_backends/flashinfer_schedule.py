"""What FlashInfer's schedules are made from, and so when one can be kept for another step."""

from enum import Enum

import numpy as np

from planner_service.client import PlanArrays

# Two steps with equal keys have equal schedules.
ScheduleKey = tuple[bytes, ...]


class Kernels(Enum):
    """A family of FlashInfer's kernels; the value is what its wrappers call it."""

    FA2 = "fa2"
    FA3 = "fa3"


def is_decode(arrays: PlanArrays) -> bool:
    """Whether every row of a plan label has one query token."""
    num_rows = len(arrays.kv_lens)
    return len(arrays.slot_mapping) == num_rows and bool(
        (arrays.qo_indptr == np.arange(num_rows + 1, dtype=np.int32)).all()
    )


def build_schedule_key(arrays: PlanArrays, kernels: Kernels) -> ScheduleKey:
    """Returns what the schedule of a plan label depends on.

    Args:
        arrays: the plan label.
        kernels: what runs it.

    Source: `DecodePlan`, `PrefillPlan` and `PrefillSM90Plan` in FlashInfer's attention/scheduler.cuh. The first two
    split the rows by their spans and page counts; the lengths themselves reach their kernels through the last pages'.
    The third, for SM90, writes every row's length into its work list.
    """
    pages = (arrays.qo_indptr.tobytes(), arrays.paged_kv_indptr.tobytes())
    return pages if kernels is Kernels.FA2 else (*pages, arrays.kv_lens.tobytes())
