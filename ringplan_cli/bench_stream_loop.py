"""A loop that stands for an engine: it takes a plan, waits as long as a forward takes, and gives the plan back."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from planner_service.client import Layout, Plan, PlannerSession, Segment

PAGE_SIZE = 16
LABELS = ("main", "cfg_text", "cfg_img")
_TIMEOUT_SECONDS = 60.0
_PREFILL_TOKENS = 65_536

Wait = Callable[[float], object]  # (seconds)


@dataclass(slots=True)
class StepTimes:
    """Times of the engine's thread, a step each, in nanoseconds.

    Args:
        calls_ns: in planning calls, without waiting for a plan.
        blocked_ns: waiting for a plan: `next_plan` where it found none ready.
        num_ready: steps whose plan was ready.
    """

    calls_ns: list[int] = field(default_factory=list)
    blocked_ns: list[int] = field(default_factory=list)
    num_ready: int = 0


class EngineLoop:
    """Runs decode steps of one batch as the engine does.

    Plans are asked for in runs of `repeat` steps, the next run when fewer than half of the last are left. What a step
    brings goes out with the next run, or when the planner may lack buffer sets for the steps that it still has to plan.

    Args:
        session: a session whose streams hold something already.
        num_rows: rows of each plan label.
        num_labels: plan labels, at most 3.
        repeat: steps that one request asks for.
        wait: stands for the forward.
    """

    def __init__(self, session: PlannerSession, num_rows: int, num_labels: int, repeat: int, wait: Wait) -> None:
        self._session = session
        self._repeat = repeat
        self._wait = wait
        self._layout = build_decode_layout(session, num_rows, num_labels)

    def run(self, num_steps: int, step_seconds: float) -> StepTimes:
        """Runs steps.

        Args:
            num_steps: how many.
            step_seconds: how long a forward takes.
        """
        times = StepTimes()
        for _ in range(num_steps):
            started = time.perf_counter_ns()
            if not self._session.num_outstanding():
                self._session.submit(self._layout, repeat=self._repeat)
            is_ready = self._session.num_ready() > 0
            asked = time.perf_counter_ns()
            plan = self._session.next_plan(_TIMEOUT_SECONDS)
            taken = time.perf_counter_ns()
            read_arrays(plan)
            if not self._session.num_outstanding():
                # Half of the run is none: the next plan is made during this step.
                self._session.submit(self._layout, repeat=self._repeat)
            began = time.perf_counter_ns()
            if step_seconds:
                self._wait(step_seconds)
            ended = time.perf_counter_ns()
            self._end_step(plan)
            calls = began - started + time.perf_counter_ns() - ended
            blocked = 0 if is_ready else taken - asked
            times.calls_ns.append(calls - blocked)
            times.blocked_ns.append(blocked)
            times.num_ready += is_ready
        return times

    def _end_step(self, plan: Plan) -> None:
        session = self._session
        session.commit(plan.step_id)
        session.release(plan.step_id)
        num_left = session.num_outstanding()
        if 2 * num_left < self._repeat:
            session.submit(self._layout, repeat=self._repeat)
        else:
            session.flush_if_due()


def build_decode_layout(session: PlannerSession, num_rows: int, num_labels: int) -> Layout:
    """Returns the layout of a decode step: a row of each request under each label."""
    labels = LABELS[:num_labels]
    return session.build_layout([Segment(request, label) for request in range(num_rows) for label in labels])


def prefill(session: PlannerSession, num_rows: int, num_labels: int, num_pages: int) -> None:
    """Fills every stream up to its last page; rows will cross pages at staggered steps."""
    lengths = [(num_pages - 1) * PAGE_SIZE + request % PAGE_SIZE + 1 for request in range(num_rows)]
    num_at_once = max(1, _PREFILL_TOKENS // (num_pages * PAGE_SIZE))
    for label in LABELS[:num_labels]:
        for first in range(0, num_rows, num_at_once):
            requests = range(first, min(first + num_at_once, num_rows))
            session.submit(session.build_layout([Segment(request, label, lengths[request]) for request in requests]))
            plan = session.next_plan(_TIMEOUT_SECONDS)
            session.commit(plan.step_id)
            session.release(plan.step_id)


def read_arrays(plan: Plan) -> int:
    """Looks at every array of a plan once, as an engine that uses them must; returns their bytes."""
    num_bytes = 0
    for arrays in plan.labels.values():
        num_bytes += arrays.qo_indptr.nbytes + arrays.paged_kv_indptr.nbytes + arrays.paged_kv_indices.nbytes
        num_bytes += arrays.paged_kv_last_page_len.nbytes + arrays.kv_lens.nbytes
        num_bytes += arrays.slot_mapping.nbytes + arrays.positions.nbytes
    return num_bytes


def spin(seconds: float) -> None:
    """Keeps the thread busy in Python, and so the interpreter's lock as any busy thread does."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        pass
