"""`ringplan bench plan`: what one plan costs, full and cached, beside two yardsticks measured in the same run."""

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from planner_service.core.layout import PlanLabelRows, StepLayout
from planner_service.core.plan import CacheMode
from planner_service.core.planner import Planner
from planner_service.core.ring import BufferSet
from planner_service.core.rows import LayoutRows, build_rows

PAGE_SIZE = 16
_STEPS_A_ROUND = 2 * PAGE_SIZE  # every row crosses a page twice
_STEPS_A_RUN = 8  # a layout is read once for so many steps, as the engine's default has it
_MAX_NAIVE_ROWS = 512
_FREE_PAGES_A_ROW = 4


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A shape of batch: `num_rows` rows in each of `num_labels` plan labels, each row on `num_pages` pages."""

    num_rows: int
    num_pages: int
    num_labels: int


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """Medians for one case, in microseconds.

    Args:
        case: the shape of the batch.
        num_bytes: bytes of one plan.
        full: a plan from scratch, written to a buffer set, with its commit.
        cached: a cached plan, advanced and written, with its commit; rows cross pages at staggered steps.
        cached_no_crossing: the same where no row crosses a page.
        naive: the tests' row-by-row reference, or None where it is not at hand or too slow to ask.
        memcpy: copying the arrays and nothing else.
    """

    case: PlanCase
    num_bytes: int
    full: float
    cached: float
    cached_no_crossing: float
    naive: float | None
    memcpy: float

    def as_json(self) -> dict[str, Any]:
        """Returns the figures with flat names."""
        figures = asdict(self)
        case = figures.pop("case")
        return {**case, **{f"{name}_us" if name != "num_bytes" else name: value for name, value in figures.items()}}

    def as_texts(self) -> tuple[str, ...]:
        """Returns the figures as a row for people."""
        case = self.case
        return (
            *(f"{count:,}" for count in (case.num_labels, case.num_rows, case.num_pages, self.num_bytes)),
            *(f"{time:.1f}" for time in (self.full, self.cached, self.cached_no_crossing)),
            "-" if self.naive is None else f"{self.naive:,.0f}",
            f"{self.memcpy:.1f}",
            "-" if self.naive is None else f"{self.naive / self.cached:,.0f}x",
        )


def measure_case(case: PlanCase, num_rounds: int) -> PlanFigures:
    """Measures one case.

    Args:
        case: the shape of the batch.
        num_rounds: rounds of 32 steps for each figure, each on a new planner.
    """
    full, num_bytes = _measure_planner(case, CacheMode.OFF, num_rounds, is_staggered=True)
    cached, steady = _measure_cached(case, num_rounds)
    return PlanFigures(
        case=case,
        num_bytes=num_bytes,
        full=statistics.median(full),
        cached=cached,
        cached_no_crossing=steady,
        naive=_measure_naive(case),
        memcpy=_measure_memcpy(num_bytes, num_rounds * _STEPS_A_ROUND),
    )


def measure_in_process(case: PlanCase, num_rounds: int) -> tuple[float, float]:
    """Returns the medians of a full plan and of a cached one, in microseconds, as `measure_case` has them."""
    full, _ = _measure_planner(case, CacheMode.OFF, num_rounds, is_staggered=True)
    cached, _ = _measure_planner(case, CacheMode.ON, num_rounds, is_staggered=True)
    return statistics.median(full), statistics.median(cached)


def measure_core(case: PlanCase, num_rounds: int) -> tuple[float, float, float]:
    """Returns the medians of a full plan, of a cached one and of one where no row crosses a page, in microseconds."""
    full, _ = _measure_planner(case, CacheMode.OFF, num_rounds, is_staggered=True)
    return statistics.median(full), *_measure_cached(case, num_rounds)


def _measure_cached(case: PlanCase, num_rounds: int) -> tuple[float, float]:
    cached, _ = _measure_planner(case, CacheMode.ON, num_rounds, is_staggered=True)
    steady, _ = _measure_planner(case, CacheMode.ON, num_rounds, is_staggered=False)
    return statistics.median(cached), statistics.median(steady)


def _measure_planner(
    case: PlanCase, cache_mode: CacheMode, num_rounds: int, *, is_staggered: bool
) -> tuple[list[float], int]:
    """Returns the time of each step in microseconds, and the bytes of the last plan."""
    times: list[float] = []
    num_bytes = 0
    for _ in range(num_rounds):
        planner, find_set = _build_planner(case, cache_mode, is_staggered=is_staggered)
        step_id = 2
        gc.disable()
        for rows in _read_layouts(case, step_id, _STEPS_A_ROUND):
            started = time.perf_counter_ns()
            plan = planner.plan(rows(), step_id, find_set)
            planner.commit_through(step_id)
            elapsed = (time.perf_counter_ns() - started) / 1e3
            # The first two cached steps fill the cache; without staggering, the steps that cross pages are left out.
            crosses = not is_staggered and (step_id - 2) % PAGE_SIZE == 0
            if step_id >= 4 and not crosses:
                times.append(elapsed)
            step_id += 1
            num_bytes = plan.num_bytes
        gc.enable()
    return times, num_bytes


def _build_planner(
    case: PlanCase, cache_mode: CacheMode, *, is_staggered: bool
) -> tuple[Planner, Callable[[int], BufferSet]]:
    """Returns a planner whose streams are prefilled, and what gives its two sets in turn."""
    num_streams = case.num_rows * case.num_labels
    num_pages = num_streams * (case.num_pages + _FREE_PAGES_A_ROW) + 1
    planner = Planner(page_size=PAGE_SIZE, num_pages=num_pages, max_streams=num_streams, cache_mode=cache_mode)
    num_aligning = 128 * case.num_labels  # items at most that stand between a plan label's arrays
    num_items = 24 * num_streams + num_pages + num_aligning
    sets = [BufferSet(1, i, np.zeros(num_items, np.int32)) for i in (0, 1)]

    def find_set(_num_bytes: int) -> BufferSet:
        sets.reverse()
        return sets[0]

    num_prefilled = num_streams * (case.num_pages + 2) * PAGE_SIZE
    scratch = BufferSet(1, 2, np.zeros(3 * num_prefilled + 4096 + num_aligning, np.int32))
    spans = np.full(case.num_rows, (case.num_pages - 1) * PAGE_SIZE)
    if is_staggered:
        spans = spans + np.arange(case.num_rows) % PAGE_SIZE
    prefill = _build_layout(case, 1, spans.astype("<i4").tobytes())
    planner.plan(build_rows(prefill, num_streams), 1, lambda _: scratch)
    planner.commit_through(1)
    return planner, find_set


def _build_layout(case: PlanCase, step_id: int, spans: bytes = b"") -> StepLayout:
    streams = np.arange(case.num_rows * case.num_labels, dtype="<i4").reshape(case.num_labels, case.num_rows)
    labels = tuple(PlanLabelRows(f"label-{i}", row.tobytes(), spans) for i, row in enumerate(streams))
    return StepLayout(step_id, labels)


def _read_layouts(case: PlanCase, step_id: int, num_steps: int) -> Iterator[Callable[[], LayoutRows]]:
    """Yields what reads the layout of each step: anew for the first of a run, kept for the others."""
    num_streams = case.num_rows * case.num_labels
    kept: list[LayoutRows] = []

    def read() -> LayoutRows:
        kept[:] = [build_rows(layout, num_streams)]
        return kept[0]

    for step in range(step_id, step_id + num_steps):
        if (step - step_id) % _STEPS_A_RUN == 0:
            layout = _build_layout(case, step)
            yield read
        else:
            yield lambda: kept[0]


def _measure_naive(case: PlanCase) -> float | None:
    """Returns a step of the tests' naive planner in microseconds, if this runs from a checkout that has it."""
    if case.num_rows > _MAX_NAIVE_ROWS:
        return None
    try:
        module = importlib.import_module("tests.reference.naive_planner")
    except ImportError:
        return None
    num_streams = case.num_rows * case.num_labels
    naive = module.NaivePlanner(PAGE_SIZE, num_streams * (case.num_pages + _FREE_PAGES_A_ROW) + 1)
    spans = np.full(case.num_rows, (case.num_pages - 1) * PAGE_SIZE).astype("<i4").tobytes()
    naive.plan(_build_layout(case, 1, spans))
    naive.commit(1)
    times = []
    for step_id in range(2, 7):
        layout = _build_layout(case, step_id)
        started = time.perf_counter_ns()
        naive.plan(layout)
        naive.commit(step_id)
        times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times)


def _measure_memcpy(num_bytes: int, num_copies: int) -> float:
    source = np.zeros(num_bytes // 4, np.int32)
    targets = [np.zeros_like(source), np.zeros_like(source)]
    times = []
    for i in range(num_copies):
        started = time.perf_counter_ns()
        targets[i % 2][:] = source
        times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times)


def build_cases(rows: Sequence[int], pages: Sequence[int], labels: Sequence[int]) -> list[PlanCase]:
    """Returns every combination of rows, pages a row and plan labels."""
    return [PlanCase(row, page, label) for label in labels for page in pages for row in rows]
