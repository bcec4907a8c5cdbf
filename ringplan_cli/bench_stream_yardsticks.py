"""What `ringplan bench stream` compares plans from a planner process with, measured in the same run."""

import statistics
import time
from dataclasses import dataclass

from ringplan_cli.bench_plan import PlanCase, measure_case
from ringplan_cli.bench_stream_loop import Wait
from ringplan_cli.planner_inspector import PlannerInspector

_NUM_CALLS = 300
_NUM_WARM_UP_CALLS = 20
_NUM_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """Medians, in microseconds.

    Args:
        in_process_full_us: the same plan made by the core in this process, from scratch.
        in_process_cached_us: the same, from the plan cache.
        unary_call_us: a unary gRPC call with next to nothing in it, to the same planner process.
    """

    in_process_full_us: float
    in_process_cached_us: float
    unary_call_us: float


def measure_yardsticks(target: str, num_rows: int, num_labels: int, num_pages: int) -> Yardsticks:
    """Measures them.

    Args:
        target: the planner's socket.
        num_rows: rows of each plan label.
        num_labels: plan labels.
        num_pages: pages that each row holds.
    """
    core = measure_case(PlanCase(num_rows, num_pages, num_labels), _NUM_ROUNDS, with_naive=False)
    return Yardsticks(core.full, core.cached, _measure_unary_call(target))


def measure_idle_cpu(step_seconds: float, wait: Wait, num_steps: int) -> float:
    """Returns the CPU of steps without planning, in microseconds a step."""
    started = time.process_time()
    for _ in range(num_steps):
        if step_seconds:
            wait(step_seconds)
    return 1e6 * (time.process_time() - started) / num_steps


def _measure_unary_call(target: str) -> float:
    times = []
    with PlannerInspector(target) as inspector:
        for _ in range(_NUM_WARM_UP_CALLS + _NUM_CALLS):
            started = time.perf_counter_ns()
            inspector.list_sessions()
            times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times[_NUM_WARM_UP_CALLS:])
