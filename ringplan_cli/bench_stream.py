"""`ringplan bench stream`: what plans from a planner process cost the engine, beside making them in its own process."""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner_service.client import CacheMode, PlannerClient, PlannerSession
from ringplan_cli.bench_stream_loop import PAGE_SIZE, EngineLoop, StepTimes, Wait, prefill, spin
from ringplan_cli.bench_stream_yardsticks import Yardsticks, measure_idle_cpu, measure_yardsticks
from ringplan_cli.local_planner import LocalPlanner
from ringplan_cli.run_report import fetch_metrics

_NUM_WARM_UP_STEPS = 24
_NANO = 1e3  # nanoseconds in a microsecond


@dataclass(frozen=True, slots=True)
class StreamCase:
    """One way to run an engine.

    Args:
        num_rows: rows of each plan label.
        num_labels: plan labels.
        repeat: steps that one request asks for.
        step_ms: how long a step takes, in milliseconds.
        ring_depth: buffer sets in the ring.
    """

    num_rows: int
    num_labels: int
    repeat: int
    step_ms: float
    ring_depth: int


@dataclass(frozen=True, slots=True)
class Spread:
    """How a time is spread over steps, in microseconds."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, times_ns: Sequence[int]) -> "Spread":
        """Returns the spread of times in nanoseconds."""
        ordered = sorted(times_ns)
        middle, high = ordered[len(ordered) // 2], ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]
        return cls(statistics.fmean(ordered) / _NANO, middle / _NANO, high / _NANO)


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """What one case took, a step, in microseconds unless it says otherwise.

    Args:
        case: the way the engine ran.
        calls: the engine's thread in planning calls, without waiting.
        blocked: the engine's thread waiting for a plan.
        ready_share: share of steps whose plan was there when it was asked for.
        engine_cpu_us: the engine process, all its threads and the loop itself included.
        idle_cpu_us: the same loop without planning.
        planner_cpu_us: the planner process.
        num_stalls: steps for which the planner had no buffer set while the engine had nothing to run.
        plans_per_second: steps a second.
        yardsticks: the same plan made otherwise.
    """

    case: StreamCase
    calls: Spread
    blocked: Spread
    ready_share: float
    engine_cpu_us: float
    idle_cpu_us: float
    planner_cpu_us: float
    num_stalls: int
    plans_per_second: float
    yardsticks: Yardsticks

    def as_json(self) -> dict[str, Any]:
        """Returns the figures with flat names."""
        figures = asdict(self)
        case, yardsticks = figures.pop("case"), figures.pop("yardsticks")
        flat: dict[str, Any] = dict(case)
        for name, value in figures.items():
            if isinstance(value, dict):
                flat |= {f"{name}_{key}_us": figure for key, figure in value.items()}
            else:
                flat[name] = value
        flat.update(yardsticks)
        return flat

    def as_texts(self) -> tuple[str, ...]:
        """Returns the figures as a row for people."""
        case, calls, blocked, other = self.case, self.calls, self.blocked, self.yardsticks
        times = (calls.mean, calls.p50, calls.p99, blocked.mean, blocked.p50, blocked.p99)
        return (
            *(f"{count:,}" for count in (case.num_labels, case.num_rows, case.repeat, case.ring_depth)),
            f"{case.step_ms:g}",
            *(f"{value:,.0f}" for value in times),
            f"{100 * self.ready_share:.1f}%",
            *(f"{value:,.0f}" for value in (self.engine_cpu_us, self.idle_cpu_us, self.planner_cpu_us)),
            f"{self.num_stalls:,}",
            f"{self.plans_per_second:,.0f}",
            *(f"{value:,.0f}" for value in (other.in_process_full_us, other.in_process_cached_us, other.unary_call_us)),
        )


def build_cases(
    rows: Sequence[int], labels: Sequence[int], repeats: Sequence[int], steps_ms: Sequence[float], ring_depth: int
) -> list[StreamCase]:
    """Returns every combination.

    Args:
        rows: rows a plan label.
        labels: plan labels.
        repeats: steps that one request asks for.
        steps_ms: how long a step takes, in milliseconds.
        ring_depth: buffer sets in the ring; 0 takes twice as many as a request asks for.
    """
    return [
        StreamCase(row, label, repeat, step_ms, ring_depth or 2 * repeat)
        for label in labels
        for row in rows
        for repeat in repeats
        for step_ms in steps_ms
    ]


def measure_stream(
    cases: Sequence[StreamCase], *, num_pages: int, num_steps: int, is_spinning: bool
) -> Iterator[StreamFigures]:
    """Yields the figures of each case; all share one planner process, each has a session of its own.

    Args:
        cases: what to measure.
        num_pages: pages that each row holds at the start.
        num_steps: steps that are timed in each case.
        is_spinning: whether a step keeps the engine's thread busy instead of letting it sleep.
    """
    wait: Wait = spin if is_spinning else time.sleep
    yardsticks: dict[tuple[int, int], Yardsticks] = {}
    idle_cpus: dict[float, float] = {}
    with LocalPlanner() as planner, PlannerClient(planner.target) as client:
        for case in cases:
            shape = (case.num_rows, case.num_labels)
            if shape not in yardsticks:
                yardsticks[shape] = measure_yardsticks(planner.target, *shape, num_pages)
            if case.step_ms not in idle_cpus:
                idle_cpus[case.step_ms] = measure_idle_cpu(case.step_ms / 1e3, wait, num_steps)
            with _open(client, case, num_pages, num_steps) as session:
                prefill(session, case.num_rows, case.num_labels, num_pages)
                times, used = _measure_case(session, case, planner, wait, num_steps)
            yield StreamFigures(
                case=case,
                calls=Spread.of(times.calls_ns),
                blocked=Spread.of(times.blocked_ns),
                ready_share=times.num_ready / num_steps,
                engine_cpu_us=1e6 * used.engine_seconds / num_steps,
                idle_cpu_us=idle_cpus[case.step_ms],
                planner_cpu_us=1e6 * used.planner_seconds / num_steps,
                num_stalls=used.num_stalls,
                plans_per_second=num_steps / used.wall_seconds,
                yardsticks=yardsticks[shape],
            )


@dataclass(slots=True)
class _Usage:
    """What was used: CPU of both processes and time, in seconds."""

    engine_seconds: float
    planner_seconds: float
    wall_seconds: float
    num_stalls: int = 0

    @classmethod
    def read(cls, planner_pid: int) -> "_Usage":
        """Returns what has been used since some fixed moment."""
        return cls(time.process_time(), read_cpu_seconds(planner_pid), time.perf_counter())

    def since(self, before: "_Usage") -> "_Usage":
        """Returns what has been used since another moment."""
        return _Usage(
            self.engine_seconds - before.engine_seconds,
            self.planner_seconds - before.planner_seconds,
            self.wall_seconds - before.wall_seconds,
        )


def read_cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process and all its threads so far."""
    # The number of a process's CPU clock, as clock_getcpuclockid(3) makes it.
    return time.clock_gettime(~pid << 3 | 2)


def _measure_case(
    session: PlannerSession, case: StreamCase, planner: LocalPlanner, wait: Wait, num_steps: int
) -> tuple[StepTimes, _Usage]:
    """Runs a case's steps; returns their times and what they used."""
    loop = EngineLoop(session, case.num_rows, case.num_labels, case.repeat, wait)
    seconds = case.step_ms / 1e3
    loop.run(_NUM_WARM_UP_STEPS, seconds)
    gc.collect()
    num_stalls = _count_stalls(planner)
    before = _Usage.read(planner.pid)
    times = loop.run(num_steps, seconds)
    used = _Usage.read(planner.pid).since(before)
    used.num_stalls = _count_stalls(planner) - num_stalls
    return times, used


def _count_stalls(planner: LocalPlanner) -> int:
    return fetch_metrics(planner.metrics_url).sum("ringplan_ring_waits_total", kind="stall") or 0


def _open(client: PlannerClient, case: StreamCase, num_pages: int, num_steps: int) -> PlannerSession:
    num_streams = case.num_rows * case.num_labels
    # Steps that are planned when the last one has run hold pages too.
    num_more = -(-(num_steps + _NUM_WARM_UP_STEPS + 2 * case.repeat) // PAGE_SIZE) + 1
    return client.open_session(
        page_size=PAGE_SIZE,
        num_pages=num_streams * (num_pages + num_more) + 1,
        max_streams=num_streams,
        ring_depth=case.ring_depth,
        cache_mode=CacheMode.ON,
        engine_name="bench stream",
    )
