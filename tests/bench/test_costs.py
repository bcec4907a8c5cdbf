"""What a step costs, counted instead of timed: calls of functions, bytes allocated, bytes on the wire.

The figures below are what was counted when they were last written, with Python 3.11 and numpy 2.4. `MARGIN` leaves room
for other versions. Who makes a step do more on purpose writes the new figure down, with a line in docs/benchmarks.md;
who makes it do less may lower it.
"""

import time
from pathlib import Path

import pytest

from planner_service.client_layout import LayoutLabel, Segment
from planner_service.client_plan import PlanReader
from planner_service.client_session import PlannerSession
from planner_service.client_wire import build_open_request
from planner_service.messages import CacheMode
from tests.bench.call_counts import count_calls, measure_bytes
from tests.bench.planner_steps import LABELS, PAGE_SIZE, RING_DEPTH, PlannerSteps
from tests.planner_service.scripted_planner import ScriptedPlanner, build_plan

MARGIN = 0.1
NUM_ROWS = 128
FIRST = 3  # steps before: a row that crosses a page does so for the first time
LATER = PAGE_SIZE + 3  # steps before: every row has crossed a page, and what that changes is kept
NUM_STEPS = 8  # of a run; less than a page, so that rows that are not staggered do not cross one

# (cache mode, plan labels, whether rows cross pages, steps before) -> calls a plan, from the request's bytes to the
# response's, and bytes that are allocated at once while a plan is made alone.
PLAN_COSTS = {
    (CacheMode.ON, 1, False, FIRST): (77, 2_050),
    (CacheMode.ON, 1, True, FIRST): (150, 16_000),
    (CacheMode.ON, 1, True, LATER): (99, 11_600),
    (CacheMode.ON, 3, True, FIRST): (199, 25_300),
    (CacheMode.ON, 3, True, LATER): (136, 13_600),
    (CacheMode.OFF, 1, True, FIRST): (159, 28_000),
    (CacheMode.OFF, 3, True, FIRST): (233, 76_500),
}
# One array of the rows left behind by each step would be more. The interpreter itself keeps some freed tuples.
BYTES_LEFT = 4_096
# Plan labels -> bytes of a run's request, and bytes a plan of its response.
WIRE_BYTES = {1: (537, 45), 3: (1_592, 120)}
# Plan labels -> calls of the client's reader thread for a plan.
CALLS_TO_READ_A_PLAN = {1: 21, 3: 35}
# Calls of the engine's thread.
CALLS_TO_ASK = 16
CALLS_A_STEP = 29


def _check(what: str, counted: float, recorded: float) -> None:
    assert counted <= recorded * (1 + MARGIN), f"{what}: {counted:,.0f}, and {recorded:,} was recorded"


def _build_steps(
    folder: Path, cache_mode: CacheMode, num_labels: int, is_staggered: bool, num_steps_before: int
) -> PlannerSteps:
    steps = PlannerSteps(
        folder, num_rows=NUM_ROWS, num_labels=num_labels, cache_mode=cache_mode, is_staggered=is_staggered
    )
    for _ in range(num_steps_before):
        steps.run(1)
    return steps


@pytest.mark.parametrize(("cache_mode", "num_labels", "is_staggered", "num_steps_before"), PLAN_COSTS)
def test_a_plan_takes_no_more_calls_than_recorded(
    tmp_path: Path, cache_mode: CacheMode, num_labels: int, is_staggered: bool, num_steps_before: int
) -> None:
    """A plan of a run, its part of reading the request and of building the response included."""
    steps = _build_steps(tmp_path, cache_mode, num_labels, is_staggered, num_steps_before)
    request = steps.build_request(NUM_STEPS)
    num_calls = count_calls(lambda: steps.answer(request))
    recorded, _ = PLAN_COSTS[cache_mode, num_labels, is_staggered, num_steps_before]
    _check("calls a plan", num_calls / NUM_STEPS, recorded)


@pytest.mark.parametrize(("cache_mode", "num_labels", "is_staggered", "num_steps_before"), PLAN_COSTS)
def test_a_plan_allocates_no_more_than_recorded(
    tmp_path: Path, cache_mode: CacheMode, num_labels: int, is_staggered: bool, num_steps_before: int
) -> None:
    """The most that one plan adds while it is made; arrays are written in place, not made anew."""
    steps = _build_steps(tmp_path, cache_mode, num_labels, is_staggered, num_steps_before)
    first, second = steps.build_request(1), steps.build_request(1)
    peak, _ = measure_bytes(lambda: steps.answer(first), lambda: steps.answer(second))
    _, recorded = PLAN_COSTS[cache_mode, num_labels, is_staggered, num_steps_before]
    _check("bytes a plan", peak, recorded)


def test_nothing_is_left_of_steps_that_have_run(tmp_path: Path) -> None:
    """Memory does not grow with steps that cross no page: what the second half leaves is what the first half left."""
    steps = _build_steps(tmp_path, CacheMode.ON, 1, False, FIRST)
    requests = iter([steps.build_request(1) for _ in range(NUM_STEPS)])

    def run() -> None:
        for _ in range(NUM_STEPS // 2):
            steps.answer(next(requests))

    _, num_left = measure_bytes(run, run)
    assert num_left <= BYTES_LEFT


@pytest.mark.parametrize("num_labels", WIRE_BYTES)
def test_a_step_takes_no_more_bytes_on_the_wire_than_recorded(tmp_path: Path, num_labels: int) -> None:
    """A run is one layout whatever its length, and a plan is a handle whatever its rows."""
    steps = _build_steps(tmp_path, CacheMode.ON, num_labels, True, FIRST)
    request = steps.build_request(RING_DEPTH)
    response = steps.answer(request)
    of_request, of_plan = WIRE_BYTES[num_labels]
    _check("bytes of a request", len(request), of_request)
    _check("bytes a plan of a response", len(response) / RING_DEPTH, of_plan)


@pytest.mark.parametrize("num_labels", CALLS_TO_READ_A_PLAN)
def test_reading_a_plan_takes_no_more_calls_than_recorded(tmp_path: Path, num_labels: int) -> None:
    """What the client's reader thread does for each plan: a view for each array, whatever the rows."""
    region = ScriptedPlanner(tmp_path).build_region()
    labels = [LayoutLabel(name, ((0, name),) * 32, (1,) * 32) for name in LABELS[:num_labels]]
    plan = build_plan(1, rows=tuple((label.name, 32) for label in labels))
    reader = PlanReader()
    assert reader.map_region(region)
    reader.read(plan, labels)
    num_calls = count_calls(lambda: reader.read(plan, labels))
    _check("calls to read a plan", num_calls, CALLS_TO_READ_A_PLAN[num_labels])


def test_a_step_of_the_engine_takes_no_more_calls_than_recorded(tmp_path: Path) -> None:
    """What the engine's thread does for a step whose plan is ready, and for asking for the next run."""
    planner = ScriptedPlanner(tmp_path)
    planner.open()
    request = build_open_request(page_size=PAGE_SIZE, num_pages=1024, max_streams=NUM_ROWS)
    session = PlannerSession(planner.start_call, request, target="unix:/p", open_timeout_seconds=10.0)
    layout = session.build_layout([Segment(request, "main") for request in range(NUM_ROWS)])

    def ask() -> None:
        session.submit(layout, repeat=NUM_STEPS)

    def run() -> None:
        for _ in range(NUM_STEPS):
            plan = session.next_plan(10.0)
            session.commit(plan.step_id)
            session.release(plan.step_id)
            session.flush_if_due()

    _check("calls to ask for a run", count_calls(ask), CALLS_TO_ASK)
    planner.answer(plans=[build_plan(step_id, rows=(("main", NUM_ROWS),)) for step_id in range(1, NUM_STEPS + 1)])
    while session.num_ready() < NUM_STEPS:
        time.sleep(0.001)
    _check("calls a step", count_calls(run) / NUM_STEPS, CALLS_A_STEP)
    planner.end()
    session.close()
