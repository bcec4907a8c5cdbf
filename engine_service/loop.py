"""What the engine's thread does: has a step planned, runs it, hands out its tokens, and never ends over one request."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engine_service.backoff import Backoff
from engine_service.errors import EngineError, StepFailedError
from engine_service.ledger import RequestLedger
from engine_service.metrics import EngineMetrics
from engine_service.planner_link import StepPlanner
from engine_service.request import GenerationEnded, OnEvent, Request
from engine_service.sampling_params import SampledToken
from engine_service.scheduler import ScheduledRow, Scheduler
from engine_service.step_layout import LayoutOptions, build_step_spec, count_steady_steps
from planner_service.client import (
    LayoutError,
    OutOfPagesError,
    Plan,
    PlannerUnavailableError,
    ProtocolError,
    SessionLostError,
)

RECONNECT_FIRST_SECONDS = 0.1
RECONNECT_MAX_SECONDS = 5.0
RECONNECT_TIMEOUT_SECONDS = 2.0
# How often an engine with nothing to do looks whether its planner is still there.
IDLE_CHECK_SECONDS = 0.5

_logger = logging.getLogger(__name__)


class EngineLoad(NamedTuple):
    """How much the engine has to do.

    Args:
        num_running: requests that hold pages.
        num_waiting: requests that wait for room.
        kv_cache_usage: the share of the usable pages that the running requests need, 0 to 1.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0


class StepExecutor(Protocol):
    """Runs planned steps on a model."""

    def run(self, rows: Sequence[ScheduledRow], plan: Plan) -> list[SampledToken | None]:
        """Runs a step; returns for each row the token chosen, or None where its prompt goes on."""

    def forget(self, request: Request) -> None:
        """Lets go of what was kept for a request."""


class EngineLoop:
    """The engine's work, one tick at a time. Used by one thread alone.

    Args:
        scheduler: decides what runs.
        planner: plans the steps.
        executor: runs the steps.
        ledger: keeps the requests that have not ended.
        metrics: the engine's metrics.
        layout_options: how steps are laid out.
        on_ready_changed: told whether the engine has a planner, when that changes.
        clock: tells seconds.
        backoff: waiting times between attempts to reach a lost planner.

    Attributes:
        load: how much there was to do after the last tick; may be read from any thread.
    """

    def __init__(  # noqa: PLR0913  # What it works with, and what tests replace.
        self,
        scheduler: Scheduler,
        planner: StepPlanner,
        executor: StepExecutor,
        ledger: RequestLedger,
        metrics: EngineMetrics,
        *,
        layout_options: LayoutOptions = LayoutOptions(),  # noqa: B008  # It is frozen.
        on_ready_changed: Callable[[bool], None] = lambda _is_ready: None,
        clock: Callable[[], float] = time.monotonic,
        backoff: Backoff | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._planner = planner
        self._executor = executor
        self._ledger = ledger
        self._metrics = metrics
        self._layout_options = layout_options
        self._on_ready_changed = on_ready_changed
        self._clock = clock
        self._backoff = backoff or Backoff(RECONNECT_FIRST_SECONDS, RECONNECT_MAX_SECONDS)
        self._retry_at = 0.0
        self._is_ready = False
        self.load = EngineLoad()

    def add(self, request: Request, on_event: OnEvent, arrived_at: float) -> None:
        """Takes in a request that arrived at a time of the loop's clock."""
        if self._ledger.open(request, on_event, arrived_at):
            self._scheduler.add(request)
        else:
            request.leave_samples()

    def abort(self, request: Request) -> None:
        """Ends a request before its time; does nothing if it has ended."""
        if request in self._ledger:
            self._finish(request, None)

    def tick(self) -> float:
        """Does what is next: a step, an attempt to reach a lost planner, or the sending of what is left to send.

        Returns:
            How many seconds there is nothing to do unless something arrives; 0 if there is more to do at once.
        """
        if not self._planner.is_connected:
            seconds = self._try_connect()
        else:
            self._set_ready(True)
            rows = self._scheduler.build_step()
            seconds = self._run_step(rows) if rows else self._rest()
        scheduler = self._scheduler
        self.load = EngineLoad(len(scheduler.running), scheduler.num_waiting, scheduler.kv_cache_usage)
        self._metrics.load_changed(*self.load)
        return seconds

    def end(self, error: EngineError | None) -> None:
        """Ends every request, by an abort or by `error`, and the planner session."""
        for request in self._ledger.requests:
            self._finish(request, error)
        self._planner.close()
        self._set_ready(False)

    def _run_step(self, rows: Sequence[ScheduledRow]) -> float:
        started_at = self._clock()
        try:
            spec = build_step_spec(rows, self._layout_options)
            plan = self._planner.plan_step(spec, count_steady_steps(rows))
        except OutOfPagesError as error:
            self._make_room(rows, error)
            return 0.0
        except LayoutError as error:
            self._fail(rows, error)
            return 0.0
        except ProtocolError as error:
            # Planning these rows again would break the protocol again.
            self._fail(rows, error)
            self._lose_planner(error)
            return 0.0
        except SessionLostError as error:
            self._lose_planner(error)
            return 0.0
        planned_at = self._clock()
        self._metrics.plan_received(planned_at - started_at, was_ready=self._planner.was_plan_ready)
        self._ledger.note_started([row.request for row in rows])
        try:
            tokens = self._executor.run(rows, plan)
        except Exception as error:
            _logger.exception("a step of %d rows failed", len(rows))
            self._planner.end_step(plan, is_kept=False)
            self._fail(rows, error)
            return 0.0
        self._planner.end_step(plan, is_kept=True)
        self._metrics.step_completed(len(rows), spec.num_padding_rows, self._clock() - planned_at)
        self._scheduler.complete_step(rows)
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                self._append(row.request, token)
        return 0.0

    def _append(self, request: Request, token: SampledToken) -> None:
        try:
            ended: GenerationEnded | EngineError | None = self._ledger.append(request, token)
        except Exception as error:
            name = request.spec.request_id
            _logger.exception("the answer of request %s cannot be built", name, extra={"request_id": name})
            ended = StepFailedError(f"the answer cannot be built: {error!r}")
        if ended is not None:
            self._finish(request, ended)

    def _make_room(self, rows: Sequence[ScheduledRow], error: OutOfPagesError) -> None:
        victim = self._scheduler.preempt_youngest()
        if victim is None:
            self._fail(rows, error)
            return
        name = victim.spec.request_id
        _logger.info("request %s is put back: %s", name, error, extra={"request_id": name})
        self._planner.drop(victim.arrival)
        self._metrics.request_preempted()

    def _fail(self, rows: Sequence[ScheduledRow], error: Exception) -> None:
        self._metrics.step_failed()
        for row in rows:
            self._finish(row.request, StepFailedError(f"the step failed: {error}"))

    def _finish(self, request: Request, event: GenerationEnded | EngineError | None) -> None:
        if self._scheduler.remove(request):
            self._planner.drop(request.arrival)
        self._executor.forget(request)
        self._ledger.close(request, event)

    def _rest(self) -> float:
        self._scheduler.check_integrity()
        try:
            self._planner.flush()
        except (SessionLostError, ProtocolError) as error:
            self._lose_planner(error)
            return 0.0
        return IDLE_CHECK_SECONDS

    def _lose_planner(self, error: Exception) -> None:
        _logger.warning("%s; running requests wait for a new session", error)
        self._set_ready(False)
        self._metrics.planner_lost()
        self._scheduler.preempt_all()
        self._planner.close()
        self._retry_at = self._clock() + self._backoff.next_delay_seconds()

    def _try_connect(self) -> float:
        wait_seconds = self._retry_at - self._clock()
        if wait_seconds > 0:
            return wait_seconds
        try:
            self._planner.connect(RECONNECT_TIMEOUT_SECONDS)
        except PlannerUnavailableError as error:
            delay_seconds = self._backoff.next_delay_seconds()
            self._retry_at = self._clock() + delay_seconds
            _logger.warning("%s; next attempt in %.1f s", error, delay_seconds)
            return delay_seconds
        self._backoff.reset()
        self._metrics.planner_reconnected()
        _logger.info("there is a new session with the planner; requests go on")
        self._set_ready(True)
        return 0.0

    def _set_ready(self, is_ready: bool) -> None:
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            if is_ready:
                self._metrics.planner_connected()
            self._on_ready_changed(is_ready)
