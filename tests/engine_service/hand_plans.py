"""Plans for the model side of the engine, made by the naive planner of the tests: no process and no shared memory."""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from planner_service.client import ArraysExtent, Plan, PlanArrays, PlanSource
from planner_service.core.layout import PADDING, Fork, StepLayout
from tests.reference.naive_planner import Arrays, NaivePlanner, append_padding_row, append_row, empty_arrays, pack_rows

# The name of a padding row.
PAD = PADDING

Rows = Sequence[tuple[int, int]]


# The (request, label) of each row of a plan label; None is a padding row.
RowKeys = Sequence[tuple[Hashable, str] | None]


def build_plan_arrays(name: str, arrays: Arrays, rows: RowKeys | None = None) -> PlanArrays:
    """Turns lists into the read-only int32 arrays that an engine sees; without `rows` no row has a name."""
    columns = {}
    for key, values in arrays.items():
        columns[key] = np.array(values, dtype=np.int32)
        columns[key].flags.writeable = False
    num_rows, num_tokens = len(arrays["kv_lens"]), len(arrays["slot_mapping"])
    extent = ArraysExtent(name, num_rows, num_tokens, len(arrays["paged_kv_indices"]), (0,) * 7)
    return PlanArrays(name=name, rows=(None,) * num_rows if rows is None else tuple(rows), extent=extent, **columns)


def build_plan(
    labels: dict[str, Arrays],
    *,
    step_id: int = 1,
    rows: Mapping[str, RowKeys] | None = None,
    page_copies_before: Sequence[tuple[int, int]] = (),
    page_copies_after: Sequence[tuple[int, int]] = (),
) -> Plan:
    """Builds a plan from lists."""
    return Plan(
        step_id=step_id,
        source=PlanSource.FULL,
        labels={name: build_plan_arrays(name, arrays, (rows or {}).get(name)) for name, arrays in labels.items()},
        page_copies_before=np.array(page_copies_before, dtype=np.int32).reshape(-1, 2),
        page_copies_after=np.array(page_copies_after, dtype=np.int32).reshape(-1, 2),
        region_id=1,
        region_buffer=np.zeros(0, dtype=np.uint8),
        set_offset=0,
        num_bytes=0,
    )


def build_scattered_arrays(rows: Sequence[tuple[int, int] | None], page_size: int) -> Arrays:
    """Builds the arrays of a plan label whose rows' pages are scattered over the pool.

    Args:
        rows: (tokens before the step, span) of each row; None is a padding row.
        page_size: tokens a page holds.
    """
    arrays = empty_arrays()
    num_pages = sum(-(-sum(row) // page_size) for row in rows if row)
    free = list(np.random.default_rng(num_pages).permutation(np.arange(1, num_pages + 1)).tolist())
    for row in rows:
        if row is None:
            append_padding_row(arrays, page_size, 1)
        else:
            pages = [free.pop() for _ in range(-(-sum(row) // page_size))]
            append_row(arrays, page_size, pages, *row)
    return arrays


class HandPlanner:
    """Plans committing steps one at a time; each is committed when the next is planned, or a stream is dropped.

    Args:
        page_size: tokens a page holds.
        num_pages: pages in the pool, the sink page included.
    """

    def __init__(self, *, page_size: int, num_pages: int) -> None:
        self.naive = NaivePlanner(page_size, num_pages)
        self._step_id = 0

    def plan(self, labels: dict[str, Rows], *, forks_before: Sequence[tuple[int, int]] = ()) -> Plan:
        """Plans a step.

        Args:
            labels: for each plan label its rows, (stream or PAD, span).
            forks_before: (source, target) streams.
        """
        self._commit()
        self._step_id += 1
        layout = StepLayout(
            self._step_id,
            tuple(pack_rows(name, rows) for name, rows in labels.items()),
            forks_before=tuple(Fork(source, target) for source, target in forks_before),
        )
        naive = self.naive.plan(layout)
        return build_plan(
            naive.arrays,
            step_id=self._step_id,
            page_copies_before=naive.page_copies_before,
            page_copies_after=naive.page_copies_after,
        )

    def drop(self, stream: int) -> None:
        """Ends a stream."""
        self._commit()
        self.naive.drop(stream)

    def _commit(self) -> None:
        if self.naive.in_flight:
            self.naive.commit(self._step_id)
