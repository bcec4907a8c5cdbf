"""Plans of a session, made ahead while the batch stays the same."""

import logging
import time
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass

from engine_service.copy_fence import POLL_SECONDS, CopyFence
from engine_service.step_layout import StepSpec
from engine_service.stream_lengths import StreamLengths
from planner_service.client import (
    MAX_REPEAT,
    MAX_RING_DEPTH,
    Layout,
    LayoutError,
    OutOfPagesError,
    Plan,
    PlannerSession,
    ProtocolError,
    RingTimeoutError,
    SessionLostError,
)

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run:
    """Equal steps, one after the other.

    Args:
        spec: what they are.
        layout: how they are planned.
        num_steps_left: how many more of them there will be after the last plan taken, unless something happens.
        num_uncounted: how many have run and are not counted in the streams' lengths yet.
        has_failed: whether pages were short, so that this run goes on step by step.
    """

    spec: StepSpec
    layout: Layout
    num_steps_left: int = 0
    num_uncounted: int = 0
    has_failed: bool = False


def choose_ring_depth(plan_ahead: int) -> int:
    """Returns how many buffer sets let a run be planned while the one before it is read and given back by halves."""
    return min(max(2, 2 * plan_ahead), MAX_RING_DEPTH)


class PlanPipeline:
    """Takes the plan of one step after the other from a session. Used by the engine's thread alone.

    While steps stay equal their plans are asked for in runs of `plan_ahead`, the next run when fewer than half of the
    last are left, so that a plan is there when its step begins. A step that is another one discards what was planned
    ahead. What a step brings (its commit, the release of its buffer set) goes out with the next request for plans, or
    by itself where the planner waits for a buffer set.

    Args:
        session: an open session.
        plan_ahead: steps to plan ahead; 0 plans each step when it begins.
        timeout_seconds: how long to wait for a plan.
        fence: tells when a step's set may go back; None where nothing reads it once the step has ended.

    Attributes:
        was_plan_ready: whether the last plan was there when it was asked for.
    """

    def __init__(
        self, session: PlannerSession, *, plan_ahead: int, timeout_seconds: float, fence: CopyFence | None = None
    ) -> None:
        self.was_plan_ready = False
        self._session = session
        self._fence = fence
        self._plan_ahead = min(plan_ahead, MAX_REPEAT)
        self._timeout_seconds = timeout_seconds
        self._run: _Run | None = None
        self._lengths = StreamLengths()
        self._last_taken = 0  # the last step that was answered

    def plan_step(self, spec: StepSpec, num_steady_steps: int = 1) -> Plan:
        """Returns the plan of the next step.

        Args:
            spec: the step.
            num_steady_steps: how many steps, this one included, will be equal to it unless something happens.

        Raises:
            LayoutError: there is no plan, and nothing has changed; `OutOfPagesError` where pages were short.
            TimeoutError: the planner does not answer.
            SessionLostError: the session has ended.
            ProtocolError: the planner ended the session because a message broke the protocol.
            CopyTimeoutError: a set cannot go back, since its copy has not been made for too long.
        """
        run = self._run
        if run is None or run.spec != spec:
            run = self._start(spec)
        run.num_steps_left = num_steady_steps
        session = self._session
        if not session.num_outstanding():
            self._ask(run, max(1, self._plan_ahead))
        self.was_plan_ready = session.num_ready() > 0
        try:
            plan = self._take()
        except (OutOfPagesError, RingTimeoutError) as error:
            plan = self._plan_again(run, error)
        except LayoutError:
            self.cut()
            raise
        run.num_steps_left -= 1
        if not session.num_outstanding():
            # The next step would find no plan: too few are planned ahead for half a run to be left now.
            self._ask_ahead(run)
        return plan

    def end_step(self, plan: Plan, *, is_kept: bool) -> None:
        """Says that the last step has run and its plan is no longer read.

        A session that is lost meanwhile shows when the next step is planned.

        Args:
            plan: the step's plan.
            is_kept: whether the tokens it wrote are kept.

        Raises:
            CopyTimeoutError: a set cannot go back, since its copy has not been made for too long.
        """
        session, run, fence = self._session, self._run, self._fence
        assert run is not None, "no request is dropped during a step"
        if fence is not None:
            fence.end(plan.step_id)
        if not is_kept:
            if fence is not None:
                # A discard gives the set back, whatever still reads it.
                fence.wait(plan.step_id)
            session.discard_from(plan.step_id)
            self._end_run()
            return
        session.commit(plan.step_id)
        if fence is None:
            session.release(plan.step_id)
        else:
            self._release_copied(fence)
        run.num_uncounted += 1
        with suppress(SessionLostError, ProtocolError):
            num_left = session.num_outstanding()
            if 2 * num_left < self._plan_ahead and num_left < run.num_steps_left:
                self._ask_ahead(run)
            else:
                session.flush_if_due()

    def cut(self) -> None:
        """Discards what is planned ahead."""
        if self._session.num_outstanding():
            self._session.discard_from(self._last_taken + 1)
        self._end_run()

    def drop(self, request: Hashable) -> None:
        """Gives up what a request holds; not during a step."""
        run = self._run
        if run is not None and any(segment.request == request for segment in run.spec.segments):
            self.cut()
        self._lengths.drop(request)
        self._session.drop(request)

    def flush(self) -> None:
        """Discards what is planned ahead and sends what has not been sent.

        Raises:
            SessionLostError: the session has ended.
            ProtocolError: the planner ended the session because a message broke the protocol.
            CopyTimeoutError: a set cannot go back, since its copy has not been made for too long.
        """
        self.cut()
        if self._fence is not None:
            self._release_copied(self._fence)
        self._session.flush()

    def _start(self, spec: StepSpec) -> _Run:
        self.cut()
        layout = self._session.build_layout(
            spec.segments,
            combined_labels=spec.combined_labels,
            commit=spec.commit,
            forks_before=spec.forks_before,
            forks_after=spec.forks_after,
        )
        self._run = _Run(spec, layout)
        return self._run

    def _end_run(self) -> None:
        if self._run is not None:
            self._count(self._run)
        self._run = None

    def _count(self, run: _Run) -> None:
        if run.num_uncounted:
            self._lengths.add(run.spec, run.num_uncounted)
            run.num_uncounted = 0

    def _ask_ahead(self, run: _Run) -> None:
        num_more = run.num_steps_left - self._session.num_outstanding()
        if self._plan_ahead and num_more > 0 and run.spec.is_repeatable and not run.has_failed:
            self._ask(run, min(self._plan_ahead, num_more))

    def _ask(self, run: _Run, num_steps: int) -> None:
        is_single = run.has_failed or not run.spec.is_repeatable
        self._session.submit(run.layout, repeat=1 if is_single else min(num_steps, run.num_steps_left))

    def _take(self) -> Plan:
        session, fence = self._session, self._fence
        try:
            plan = session.next_plan(self._timeout_seconds) if fence is None else self._take_while_copying(fence)
        except LayoutError as error:
            assert error.step_id is not None, "the planner names the step"
            self._last_taken = error.step_id + error.num_steps - 1
            raise
        self._last_taken = plan.step_id
        return plan

    def _take_while_copying(self, fence: CopyFence) -> Plan:
        """Waits for a plan, and meanwhile lets sets go as their copies are made: the planner may need one of them."""
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            self._release_copied(fence)
            seconds_left = deadline - time.monotonic()
            if not fence.is_holding or seconds_left <= 0:
                return self._session.next_plan(max(seconds_left, 0.0))
            with suppress(TimeoutError):
                return self._session.next_plan(min(seconds_left, POLL_SECONDS))

    def _release_copied(self, fence: CopyFence) -> None:
        step_id = fence.take_free()
        if step_id:
            self._session.release(step_id)

    def _plan_again(self, run: _Run, error: LayoutError) -> Plan:
        """Plans a step alone and as things stand now: it may have been planned ahead, or pages lie reserved."""
        session = self._session
        self.was_plan_ready = False
        self._count(run)
        if session.num_outstanding():
            session.discard_from(self._last_taken + 1)
        if isinstance(error, OutOfPagesError):
            run.has_failed = True
            # Steps that were planned and then discarded leave their pages with their streams.
            for (request, label), length in self._lengths.items():
                session.truncate(request, label, length)
        else:
            _logger.warning("a step is planned again: %s", error)
        self._ask(run, 1)
        try:
            return self._take()
        except LayoutError:
            self._end_run()
            raise
