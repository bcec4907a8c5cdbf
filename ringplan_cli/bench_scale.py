"""`ringplan bench scale`: many sessions, many streams, long contexts and large pools, on a real planner process."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner_service.client import CacheMode, PlannerClient, PlannerSession, Segment
from ringplan_cli.local_planner import LocalPlanner

PAGE_SIZE = 16
NUM_STEPS = 40
LABEL = "main"
_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ScaleFigures:
    """What one case took.

    Args:
        name: the case, for people.
        num_pages_held: pages that its streams hold at the end.
        private_bytes: memory of the planner beyond an idle one, without the regions.
        region_bytes: shared memory of the planner: its regions.
        plan_us: median time from asking for a decode step to having its plan, in microseconds, planned one at a time.
    """

    name: str
    num_pages_held: int
    private_bytes: int
    region_bytes: int
    plan_us: float

    def as_json(self) -> dict[str, Any]:
        """Returns the figures with their names."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ScaleCase:
    """Sessions that all hold the same.

    Args:
        name: for people.
        num_sessions: sessions open at once.
        num_streams: streams of each.
        num_tokens: length of each stream.
        num_rows: rows of the decode batches that are timed; the others rest.
        num_pages: each session's pool; 0 is just what it needs.
    """

    name: str
    num_sessions: int
    num_streams: int
    num_tokens: int
    num_rows: int
    num_pages: int = 0


CASES = (
    ScaleCase("1 session, 32 streams of 160 tokens", 1, 32, 160, 32),
    ScaleCase("16 sessions, 32 streams of 160 tokens each", 16, 32, 160, 32),
    ScaleCase("10,000 streams of 160 tokens, 512 decode", 1, 10_000, 160, 512),
    ScaleCase("10,000 streams of 160 tokens, all decode", 1, 10_000, 160, 10_000),
    ScaleCase("100 contexts of 131,072 tokens, pool of 1,000,000 pages", 1, 100, 131_072, 100, 1_000_000),
)


def measure_scale(cases: tuple[ScaleCase, ...] = CASES) -> Iterator[ScaleFigures]:
    """Yields the figures of each case, each on a planner of its own."""
    for case in cases:
        with LocalPlanner() as planner, ExitStack() as stack:
            idle_private, _ = _read_memory(planner.pid)
            client = stack.enter_context(PlannerClient(planner.target))
            sessions = [stack.enter_context(_open(client, case)) for _ in range(case.num_sessions)]
            for session in sessions:
                _prefill(session, case)
            steps = [_build_step(session, case) for session in sessions]
            times = [step() for _ in range(NUM_STEPS) for step in steps]
            private, shared = _read_memory(planner.pid)
            pages_a_stream = -(-(case.num_tokens + NUM_STEPS) // PAGE_SIZE)
            num_resting = case.num_streams - case.num_rows
            num_pages = case.num_rows * pages_a_stream + num_resting * -(-case.num_tokens // PAGE_SIZE)
            yield ScaleFigures(
                name=case.name,
                num_pages_held=case.num_sessions * num_pages,
                private_bytes=private - idle_private,
                region_bytes=shared,
                plan_us=statistics.median(times[2 * len(steps) :]),
            )


def _open(client: PlannerClient, case: ScaleCase) -> PlannerSession:
    num_pages = case.num_pages or case.num_streams * (-(-(case.num_tokens + NUM_STEPS) // PAGE_SIZE)) + 1
    return client.open_session(
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_streams=case.num_streams,
        cache_mode=CacheMode.ON,
        engine_name="bench scale",
    )


def _prefill(session: PlannerSession, case: ScaleCase) -> None:
    num_at_once = max(1, 65_536 // case.num_tokens)
    for first in range(0, case.num_streams, num_at_once):
        requests = range(first, min(first + num_at_once, case.num_streams))
        session.submit(session.build_layout([Segment(request, LABEL, case.num_tokens) for request in requests]))
        _end(session)


def _build_step(session: PlannerSession, case: ScaleCase) -> Callable[[], float]:
    layout = session.build_layout([Segment(request, LABEL) for request in range(case.num_rows)])

    def step() -> float:
        started = time.perf_counter_ns()
        session.submit(layout)
        plan = session.next_plan(_TIMEOUT_SECONDS)
        elapsed = (time.perf_counter_ns() - started) / 1e3
        session.commit(plan.step_id)
        session.release(plan.step_id)
        return elapsed

    return step


def _end(session: PlannerSession) -> None:
    plan = session.next_plan(_TIMEOUT_SECONDS)
    session.commit(plan.step_id)
    session.release(plan.step_id)


def _read_memory(pid: int) -> tuple[int, int]:
    """Returns the private and the shared-memory bytes of a process that are in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = {
        name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    return 1024 * kilobytes["RssAnon"], 1024 * kilobytes["RssShmem"]
