"""What a step costs, counted instead of timed: calls of functions, bytes allocated, bytes on the wire.

The figures below are what was counted when they were last written, with Python 3.11 and numpy 2.4. A figure may be passed by `MARGIN`,
which leaves room for other versions. Who makes a step do more on purpose writes the new figure down, with a line in
docs/benchmarks.md; who makes it do less may lower it.
"""

from pathlib import Path

import pytest

from planner_service.messages import CacheMode
from tests.bench.call_counts import count_calls, measure_bytes
from tests.bench.planner_steps import RING_DEPTH, PlannerSteps

MARGIN = 0.1
NUM_ROWS = 128
NUM_WARM_UP_STEPS = 3
NUM_STEPS = 8  # of a run; less than a page, so that rows that are not staggered do not cross one

# (cache mode, plan labels, whether rows cross pages) -> calls a plan, from the request's bytes to the response's.
CALLS_A_PLAN = {
    (CacheMode.ON, 1, False): 1,
    (CacheMode.ON, 1, True): 1,
    (CacheMode.ON, 3, True): 1,
    (CacheMode.OFF, 1, True): 1,
    (CacheMode.OFF, 3, True): 1,
}
# The same -> bytes that are allocated at once while a plan is made alone.
BYTES_A_PLAN = {
    (CacheMode.ON, 1, False): 1,
    (CacheMode.ON, 1, True): 1,
    (CacheMode.ON, 3, True): 1,
    (CacheMode.OFF, 1, True): 1,
    (CacheMode.OFF, 3, True): 1,
}
# Plan labels -> bytes of a run's request, and bytes a plan of its response.
WIRE_BYTES = {1: (1, 1), 3: (1, 1)}


def _check(what: str, counted: float, recorded: float) -> None:
    print(what, counted)
    assert counted <= recorded * (1 + MARGIN), f"{what}: {counted:,.0f}, and {recorded:,} was recorded"


def _build_steps(folder: Path, cache_mode: CacheMode, num_labels: int, is_staggered: bool) -> PlannerSteps:
    steps = PlannerSteps(
        folder, num_rows=NUM_ROWS, num_labels=num_labels, cache_mode=cache_mode, is_staggered=is_staggered
    )
    for _ in range(NUM_WARM_UP_STEPS):
        steps.run(1)
    return steps


@pytest.mark.parametrize(("cache_mode", "num_labels", "is_staggered"), CALLS_A_PLAN)
def test_a_plan_takes_no_more_calls_than_recorded(
    tmp_path: Path, cache_mode: CacheMode, num_labels: int, is_staggered: bool
) -> None:
    """A plan of a run, its part of reading the request and of building the response included."""
    steps = _build_steps(tmp_path, cache_mode, num_labels, is_staggered)
    request = steps.build_request(NUM_STEPS)
    num_calls = count_calls(lambda: steps.answer(request))
    _check("calls a plan", num_calls / NUM_STEPS, CALLS_A_PLAN[cache_mode, num_labels, is_staggered])


@pytest.mark.parametrize(("cache_mode", "num_labels", "is_staggered"), BYTES_A_PLAN)
def test_a_plan_allocates_no_more_than_recorded(
    tmp_path: Path, cache_mode: CacheMode, num_labels: int, is_staggered: bool
) -> None:
    """The most that one plan adds while it is made; arrays are written in place, not made anew."""
    steps = _build_steps(tmp_path, cache_mode, num_labels, is_staggered)
    request = steps.build_request(1)
    peak, _ = measure_bytes(lambda: steps.answer(request))
    _check("bytes a plan", peak, BYTES_A_PLAN[cache_mode, num_labels, is_staggered])


def test_nothing_is_left_of_a_step_that_has_run(tmp_path: Path) -> None:
    """Memory does not grow with steps that cross no page: what one leaves the next takes its place."""
    steps = _build_steps(tmp_path, CacheMode.ON, 1, False)
    requests = [steps.build_request(1) for _ in range(NUM_STEPS)]
    lefts = [measure_bytes(lambda request=request: steps.answer(request))[1] for request in requests]
    print(lefts)


@pytest.mark.parametrize("num_labels", WIRE_BYTES)
def test_a_step_takes_no_more_bytes_on_the_wire_than_recorded(tmp_path: Path, num_labels: int) -> None:
    """A run is one layout whatever its length, and a plan is a handle whatever its rows."""
    steps = _build_steps(tmp_path, CacheMode.ON, num_labels, True)
    request = steps.build_request(RING_DEPTH)
    response = steps.answer(request)
    of_request, of_plan = WIRE_BYTES[num_labels]
    _check("bytes of a request", len(request), of_request)
    _check("bytes a plan of a response", len(response) / RING_DEPTH, of_plan)
