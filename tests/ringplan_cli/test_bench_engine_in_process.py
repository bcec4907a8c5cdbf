"""The planner in the engine's own process plans what the one in a process of its own does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_service.step_layout import StepSpec
from planner_service.client import CacheMode, OutOfPagesError, PlanSource, Segment
from ringplan_cli.bench_engine_in_process import InProcessPlanner
from tests.engine_service.hand_plans import HandPlanner

PAGE_SIZE = 4


@pytest.fixture
def planner() -> Iterator[InProcessPlanner]:
    """A planner with 9 usable pages and a cache."""
    planner = InProcessPlanner(page_size=PAGE_SIZE, num_pages=10, max_streams=4, cache_mode=CacheMode.ON)
    yield planner
    planner.close()


def _build_spec(spans: dict[int, int]) -> StepSpec:
    return StepSpec(tuple([Segment(request, "main", span) for request, span in spans.items()]))


def test_plans_are_those_of_the_naive_planner(planner: InProcessPlanner) -> None:
    """A prefill, decode steps over a page's end, one request less, and another in the pages it gave up."""
    naive = HandPlanner(page_size=PAGE_SIZE, num_pages=10)
    steps = [{0: 5, 1: 7}, *[{0: 1, 1: 1}] * 4, {1: 1}, {1: 1, 2: 6}]
    sources = []
    for number, spans in enumerate(steps):
        if number == 5:
            planner.drop(0)
            naive.drop(0)
        plan = planner.plan_step(_build_spec(spans))
        sources.append(plan.source)
        expected = naive.plan({"main": list(spans.items())}).labels["main"]
        found = plan.labels["main"]
        for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "kv_lens", "slot_mapping", "positions"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist(), (number, name)
        planner.end_step(plan, is_kept=True)
    assert sources[1:5] == [PlanSource.FULL, *[PlanSource.CACHED] * 3]


def test_the_ring_is_in_memory_as_a_planner_s_is(planner: InProcessPlanner) -> None:
    """CUDA refuses to register memory of a disk's file system: the comparison would be of two kinds of memory."""
    address = planner.plan_step(_build_spec({0: 5})).region_buffer.ctypes.data
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = {tuple(int(end, 16) for end in line[0].split("-")): line[5] for line in lines if len(line) == 6}
    (name,) = [name for (start, stop), name in ranges.items() if start <= address < stop]
    assert name.startswith("/dev/shm/")


def test_step_without_pages_is_an_error(planner: InProcessPlanner) -> None:
    """As from the planner's process."""
    with pytest.raises(OutOfPagesError):
        planner.plan_step(_build_spec({0: 10 * PAGE_SIZE}))
