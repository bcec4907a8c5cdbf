"""`ringplan bench growth`: how the cost of a plan and a planner's memory grow, one quantity at a time."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ringplan_cli.bench_plan import PlanCase, measure_in_turn, take_medians
from ringplan_cli.bench_scale import ScaleCase, ScaleFigures, measure_scale

ROWS = (1, 8, 32, 128, 512, 2_048)
PAGES = (1, 4, 16, 64, 256, 1_024)
LABELS = (1, 2, 3, 4, 6, 8)
SESSIONS = (1, 2, 4, 8, 16, 32)
_ROWS, _PAGES, _LABELS = 128, 64, 1  # what is held while another quantity grows
_SESSION_STREAMS, _SESSION_TOKENS = 32, 160
_STREAMS = (1_000, 20_000)
_STREAM_TOKENS = (160, 16_160)


@dataclass(frozen=True, slots=True)
class PlanCost:
    """What a plan of one size costs in the core, medians in microseconds (see `bench_plan.PlanFigures`).

    Args:
        quantity: what grows: "rows", "pages a row" or "plan labels".
        value: how much of it.
        full: from scratch.
        cached: from the cache, rows crossing pages at staggered steps.
        steady: from the cache, no row crossing a page.
    """

    quantity: str
    value: int
    full: float
    cached: float
    steady: float


@dataclass(frozen=True, slots=True)
class MemoryCost:
    """Private bytes of a planner process for one thing more, from differences between cases of the same run.

    Args:
        stream: bytes for a stream, without its pages.
        page: bytes for a page that a stream holds, its place in the pool included.
        session: bytes for a session of 32 streams of 160 tokens, its region not included.
        session_region: bytes of shared memory for such a session.
    """

    stream: float
    page: float
    session: float
    session_region: float


@dataclass(frozen=True, slots=True)
class GrowthFigures:
    """Everything that one run measured.

    Args:
        plans: what plans cost in the core.
        sessions: a planner process with more and more sessions.
        memory: what one thing more takes.
    """

    plans: tuple[PlanCost, ...]
    sessions: tuple[tuple[int, ScaleFigures], ...]
    memory: MemoryCost

    def as_json(self) -> dict[str, Any]:
        """Returns the figures with their names."""
        return asdict(self)


def build_plan_cases() -> Iterator[tuple[str, int, PlanCase]]:
    """Yields (quantity, value, case) for every size of plan."""
    for rows in ROWS:
        yield "rows", rows, PlanCase(num_rows=rows, num_pages=_PAGES, num_labels=_LABELS)
    for pages in PAGES:
        yield "pages a row", pages, PlanCase(num_rows=_ROWS, num_pages=pages, num_labels=_LABELS)
    for labels in LABELS:
        yield "plan labels", labels, PlanCase(num_rows=_ROWS, num_pages=_PAGES, num_labels=labels)


def measure_plans(num_turns: int) -> Iterator[PlanCost]:
    """Yields what a plan of each size costs.

    Args:
        num_turns: times that all sizes are measured, in turn.
    """
    sizes = list(build_plan_cases())
    turns = list(measure_in_turn([case for _, _, case in sizes], num_turns, with_naive=False))
    for i, (quantity, value, _) in enumerate(sizes):
        figures = take_medians(turns[i :: len(sizes)])
        yield PlanCost(quantity, value, figures.full, figures.cached, figures.cached_no_crossing)


def measure_sessions() -> Iterator[tuple[int, ScaleFigures]]:
    """Yields (sessions, figures) of planner processes with more and more sessions."""
    cases = tuple(ScaleCase(f"{count} sessions", count, _SESSION_STREAMS, _SESSION_TOKENS, 32) for count in SESSIONS)
    yield from zip(SESSIONS, measure_scale(cases), strict=True)


def measure_memory(sessions: Sequence[tuple[int, ScaleFigures]]) -> MemoryCost:
    """Returns what one thing more takes.

    Args:
        sessions: from `measure_sessions`.
    """
    few_streams, many_streams = _STREAMS
    short, long = _STREAM_TOKENS
    cases = (
        ScaleCase("few streams", 1, few_streams, short, 32),
        ScaleCase("many streams", 1, many_streams, short, 32),
        ScaleCase("few long streams", 1, few_streams, long, 32),
    )
    few, many, longer = measure_scale(cases)
    return weigh(few, many, longer, many_streams - few_streams, sessions)


def weigh(
    few: ScaleFigures,
    many: ScaleFigures,
    longer: ScaleFigures,
    num_streams: int,
    sessions: Sequence[tuple[int, ScaleFigures]],
) -> MemoryCost:
    """Works out what one thing more takes from cases that differ in that alone, or in pages besides.

    Args:
        few: a planner with few short streams.
        many: with `num_streams` more of them.
        longer: with as many as the first, but long ones.
        num_streams: see above.
        sessions: numbers of sessions, rising, and a planner with so many.
    """
    page = (longer.private_bytes - few.private_bytes) / (longer.num_pages_held - few.num_pages_held)
    stream = (many.private_bytes - few.private_bytes - page * (many.num_pages_held - few.num_pages_held)) / num_streams
    return MemoryCost(
        stream=stream,
        page=page,
        session=_find_slope([(count, figures.private_bytes) for count, figures in sessions]),
        session_region=_find_slope([(count, figures.region_bytes) for count, figures in sessions]),
    )


def _find_slope(points: Sequence[tuple[int, int]]) -> float:
    """Returns what one more adds: the median over all pairs, as a planner gives memory of its start back at some time.

    Source: the Theil-Sen estimator (https://en.wikipedia.org/wiki/Theil-Sen_estimator).
    """
    return statistics.median((y - b) / (x - a) for (a, b), (x, y) in itertools.combinations(points, 2))
