"""What the planner has answered: results of submitted steps, in step order, without those discarded meanwhile."""

import queue
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from planner_service.client_layout import LayoutLabel
from planner_service.client_plan import Plan, PlanReader
from planner_service.client_wire import read_plan_error
from planner_service.errors import LayoutError
from ringplan.planner.v1 import planner_pb2

Result = Plan | LayoutError


class _Run(NamedTuple):
    """Consecutive steps of one layout."""

    steps: range
    labels: tuple[LayoutLabel, ...]


class PlanInbox:
    """Results on their way from the reader thread to the engine's.

    `take_results` and `wake` belong to the reader thread, everything else to the engine's thread. What both touch is
    changed by single operations that are atomic: appending to a queue, or replacing a tuple.

    Args:
        max_streams: the session's, for errors that name it.
    """

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._arrived: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        self._runs: deque[_Run] = deque()
        self._discarded: tuple[range, ...] = ()
        # The engine's thread alone.
        self._ready: deque[Result] = deque()
        self._outstanding: deque[range] = deque()
        self._last_received = 0
        # The reader thread alone.
        self._reader = PlanReader()

    def expect(self, steps: range, labels: tuple[LayoutLabel, ...]) -> None:
        """Says which steps will be sent to the planner next, and what rows they have."""
        self._outstanding.append(steps)
        self._runs.append(_Run(steps, labels))

    def has_outstanding(self) -> bool:
        """Whether a step has been sent whose result has not been taken."""
        return bool(self._outstanding)

    def num_outstanding(self) -> int:
        """Returns how many steps have been sent whose result has not been taken."""
        return sum(map(len, self._outstanding))

    def num_ready(self) -> int:
        """Returns how many results can be taken without waiting."""
        while not self._arrived.empty():
            self._receive(0.0)
        return len(self._ready)

    def take(self, timeout_seconds: float | None) -> Result | None:
        """Returns the next result in step order, or None if the stream ended instead.

        Args:
            timeout_seconds: how long to wait; None waits as long as the stream lives.

        Raises:
            TimeoutError: nothing came in time.
        """
        if not self._ready and not self._wait(timeout_seconds):
            return None
        result = self._ready.popleft()
        self._forget_before(_find_end(result))
        return result

    def discard_from(self, step_id: int, next_step_id: int) -> None:
        """Sees to it that no step from `step_id` up to `next_step_id`, exclusive, is taken any more."""
        self.num_ready()
        start = step_id
        kept = []
        for steps in self._discarded:
            if steps.stop >= start:
                start = min(start, steps.start)
            elif steps.stop > self._last_received:
                # Results of these steps may still be on their way: they come in step order.
                kept.append(steps)
        self._discarded = (*kept, range(start, next_step_id))
        self._outstanding = deque(_cut(self._outstanding, step_id))
        ready, self._ready = self._ready, deque()
        for result in ready:
            self._add(result)

    def take_regions(self, regions: Iterable[planner_pb2.Region]) -> int:
        """Maps new regions; returns the newest one that is mapped now, or 0. In the reader thread."""
        return max((region.region_id for region in regions if self._reader.map_region(region)), default=0)

    def check_regions(self) -> None:
        """Raises what kept a region from being mapped. In the reader thread.

        Raises:
            RegionUnavailableError: a region could not be mapped.
        """
        self._reader.check_regions()

    def take_results(self, response: planner_pb2.PlanResponse) -> None:
        """Reads the results of a response. In the reader thread.

        Raises:
            ValueError: a result answers nothing that was asked.
            RegionUnavailableError: a plan's region could not be mapped.
        """
        results: Iterable[planner_pb2.Plan | planner_pb2.PlanError] = response.plans
        if response.errors:
            results = sorted([*response.plans, *response.errors], key=lambda result: result.step_id)
        for result in results:
            labels = self._find_labels(result.step_id)
            if isinstance(result, planner_pb2.PlanError):
                self._arrived.put(read_plan_error(result, self._max_streams))
            elif not self._is_discarded(result.step_id):
                self._arrived.put(self._reader.read(result, labels))

    def wake(self) -> None:
        """Ends a wait: nothing will come any more. In the reader thread."""
        self._arrived.put(None)

    def _wait(self, timeout_seconds: float | None) -> bool:
        """Returns once a result is ready, or False if the stream has ended."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self._ready:
            try:
                if not self._receive(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    return False
            except queue.Empty:
                raise TimeoutError(f"step {self._outstanding[0].start} has no plan after {timeout_seconds} s") from None
        return True

    def _receive(self, timeout_seconds: float | None) -> bool:
        """Moves one result to the ready ones, unless it has been discarded; returns False if the stream has ended."""
        result = self._arrived.get(timeout=timeout_seconds)
        if result is None:
            return False
        self._last_received = result.step_id
        self._add(result)
        return True

    def _add(self, result: Result) -> None:
        if self._is_discarded(result.step_id):
            return
        if isinstance(result, LayoutError) and result.num_steps > 1:
            # A run may have been cut within the steps that have no plan.
            steps = range(result.step_id, result.step_id + result.num_steps)
            result.num_steps = next((step for step in steps if self._is_discarded(step)), steps.stop) - steps.start
        self._ready.append(result)

    def _is_discarded(self, step_id: int) -> bool:
        return any(step_id in steps for steps in self._discarded)

    def _find_labels(self, step_id: int) -> tuple[LayoutLabel, ...]:
        while self._runs and self._runs[0].steps.stop <= step_id:
            self._runs.popleft()
        if not self._runs or step_id not in self._runs[0].steps:
            raise ValueError(f"the planner answers step {step_id}, which nobody asked for")
        return self._runs[0].labels

    def _forget_before(self, step_id: int) -> None:
        """Forgets outstanding steps before `step_id`: theirs is the result just taken."""
        while self._outstanding and self._outstanding[0].start < step_id:
            steps = self._outstanding.popleft()
            if steps.stop > step_id:
                self._outstanding.appendleft(range(step_id, steps.stop))


def _find_end(result: Result) -> int:
    return result.step_id + (result.num_steps if isinstance(result, LayoutError) else 1)


def _cut(runs: Iterable[range], end: int) -> Iterable[range]:
    """Returns the parts of `runs` before `end`."""
    return [range(steps.start, min(steps.stop, end)) for steps in runs if steps.start < end]
