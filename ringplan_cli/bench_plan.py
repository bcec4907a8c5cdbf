"""`ringplan bench plan`: what one plan costs, full and cached, beside two yardsticks measured in the same run."""

import gc
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from planner_service.core.layout import PlanLabelRows, StepLayout
from planner_service.core.plan import CacheMode
from planner_service.core.planner import Planner
from planner_service.core.ring import BufferSet
from planner_service.core.rows import LayoutRows

PAGE_SIZE = 16
_STEPS_A_ROUND = 3 * PAGE_SIZE  # every row crosses a page three times
_NUM_FIRST_STEPS = PAGE_SIZE + 2  # by then every row has crossed a page
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
        first: a cached plan, advanced and written, with its commit, in a batch's first steps: rows cross pages at
            staggered steps, each for the first time.
        cached: the same in later steps.
        cached_no_crossing: the same where no row crosses a page.
        naive: the tests' row-by-row reference, or None where it is not at hand or too slow to ask.
        memcpy: copying the arrays and nothing else.
    """

    case: PlanCase
    num_bytes: int
    full: float
    first: float
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
            *(f"{time:.1f}" for time in (self.full, self.first, self.cached, self.cached_no_crossing)),
            "-" if self.naive is None else f"{self.naive:,.0f}",
            f"{self.memcpy:.1f}",
            "-" if self.naive is None else f"{self.naive / self.cached:,.0f}x",
        )


def measure_case(case: PlanCase, num_rounds: int, *, with_naive: bool = True) -> PlanFigures:
    """Measures one case.

    Args:
        case: the shape of the batch.
        num_rounds: rounds of 48 steps for each figure, each on a new planner.
        with_naive: whether to ask the tests' reference too.
    """
    full, num_bytes = _measure_planner(case, CacheMode.OFF, num_rounds, is_staggered=True)
    staggered, _ = _measure_planner(case, CacheMode.ON, num_rounds, is_staggered=True)
    steady, _ = _measure_planner(case, CacheMode.ON, num_rounds, is_staggered=False)
    return PlanFigures(
        case=case,
        num_bytes=num_bytes,
        full=_take_median(full),
        first=_take_median(staggered[:_NUM_FIRST_STEPS]),
        cached=_take_median(staggered[_NUM_FIRST_STEPS:]),
        cached_no_crossing=_take_median([times for step, times in enumerate(steady) if step % PAGE_SIZE]),
        naive=_measure_naive(case) if with_naive else None,
        memcpy=_measure_memcpy(num_bytes, num_rounds * _STEPS_A_ROUND),
    )


def measure_in_turn(cases: Sequence[PlanCase], num_turns: int, *, with_naive: bool = True) -> Iterator[PlanFigures]:
    """Measures all cases in turn, several times, and yields every figure as it comes, a turn after the other.

    What else a machine does for a second is then in one turn of many cases, not in every figure of one: medians over
    the turns (`take_medians`) leave it out.

    Args:
        cases: the shapes of the batches.
        num_turns: how many times each is measured.
        with_naive: whether to ask the tests' reference too, in the first turn.
    """
    for turn in range(num_turns):
        for case in cases:
            yield measure_case(case, 1, with_naive=with_naive and not turn)


def take_medians(turns: Sequence[PlanFigures]) -> PlanFigures:
    """Returns the median of each figure of one case; the naive reference's is the first turn's."""
    names = ("full", "first", "cached", "cached_no_crossing", "memcpy")
    return replace(turns[0], **{name: statistics.median(getattr(turn, name) for turn in turns) for name in names})


def _take_median(steps: list[list[float]]) -> float:
    return statistics.median(itertools.chain.from_iterable(steps))


def _measure_planner(
    case: PlanCase, cache_mode: CacheMode, num_rounds: int, *, is_staggered: bool
) -> tuple[list[list[float]], int]:
    """Returns the times of each step in microseconds, one of each round, and the bytes of the last plan.

    The first two cached steps fill the cache and have no times. Without staggering every `PAGE_SIZE`-th step crosses
    pages.
    """
    times: list[list[float]] = [[] for _ in range(_STEPS_A_ROUND)]
    num_bytes = 0
    for _ in range(num_rounds):
        planner, find_set = _build_planner(case, cache_mode, is_staggered=is_staggered)
        step_id = 2
        gc.disable()
        for read in _read_layouts(planner, case, step_id, _STEPS_A_ROUND):
            started = time.perf_counter_ns()
            plan = planner.plan(read(), step_id, find_set)
            planner.commit_through(step_id)
            elapsed = (time.perf_counter_ns() - started) / 1e3
            if step_id >= 4:
                times[step_id - 2].append(elapsed)
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
    planner.plan(planner.read(prefill), 1, lambda _: scratch)
    planner.commit_through(1)
    return planner, find_set


def _build_layout(case: PlanCase, step_id: int, spans: bytes = b"") -> StepLayout:
    streams = np.arange(case.num_rows * case.num_labels, dtype="<i4").reshape(case.num_labels, case.num_rows)
    labels = tuple(PlanLabelRows(f"label-{i}", row.tobytes(), spans) for i, row in enumerate(streams))
    return StepLayout(step_id, labels)


def _read_layouts(planner: Planner, case: PlanCase, step_id: int, num_steps: int) -> Iterator[Callable[[], LayoutRows]]:
    """Yields what reads the layout of each step: anew for the first of a run, kept for the others."""
    kept: list[LayoutRows] = []

    def read() -> LayoutRows:
        kept[:] = [planner.read(layout)]
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
