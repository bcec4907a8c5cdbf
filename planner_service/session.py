"""One engine's session: its messages in order, the steps that wait for a buffer set, and the protocol's rules."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from planner_service.core.cache import DEFAULT_NUM_ENTRIES
from planner_service.core.layout import StepLayout, StreamOperation
from planner_service.core.planner import Planner
from planner_service.core.ring import AllocateRegion, RegionDescription, Ring, choose_set_bytes
from planner_service.core.rows import LayoutRows
from planner_service.errors import LayoutError, ProtocolError, RingTimeoutError
from planner_service.messages import (
    PlanFailed,
    PlanReady,
    SessionDump,
    SessionMessage,
    SessionOptions,
    SessionReply,
    SessionSummary,
    WaitKind,
)
from planner_service.observer import SessionObserver, report_plan
from planner_service.ring_wait import RingWait
from planner_service.session_report import build_dump, build_summary, describe_plan

PLANS_A_PART = 16
_MAX_STEP_ID = (1 << 63) - 1


@dataclass(slots=True)
class _Run:
    """A layout with steps left to plan: `next_step` up to, without, `end_step`."""

    layout: StepLayout
    next_step: int
    end_step: int
    rows: LayoutRows | None = None


@dataclass(frozen=True, slots=True)
class _Discard:
    step_id: int


@dataclass(frozen=True, slots=True)
class _Commit:
    step_id: int


class Session:
    """Applies an engine's messages and answers with plans.

    Parts of messages are applied in order: what stands behind a step that waits for a buffer set waits too, so
    plans do not depend on how deep the ring is. Only releases, and the cutting of waiting steps that are
    discarded, take effect at once.

    Args:
        name: names the session in metrics and logs.
        options: what the engine asked for.
        allocate_region: makes a region of shared memory.
        clock: seconds, never falling.
        ring_timeout_seconds: how long a step waits for a buffer set after the engine's last release or commit.
        observer: is told what happens.
        num_cache_entries: how many layouts the plan cache keeps.

    Raises:
        RegionUnavailableError: there is no memory for the ring.
    """

    def __init__(
        self,
        name: str,
        options: SessionOptions,
        allocate_region: AllocateRegion,
        *,
        clock: Callable[[], float],
        ring_timeout_seconds: float,
        observer: SessionObserver,
        num_cache_entries: int = DEFAULT_NUM_ENTRIES,
    ) -> None:
        self.name = name
        self.options = options
        self._clock = clock
        self._observer = observer
        self._opened_seconds = clock()
        self._planner = Planner(
            page_size=options.page_size,
            num_pages=options.num_pages,
            max_streams=options.max_streams,
            cache_mode=options.cache_mode,
            num_cache_entries=num_cache_entries,
        )
        self._ring = Ring(
            options.ring_depth,
            options.set_bytes or choose_set_bytes(options.num_pages, options.max_streams),
            allocate_region,
        )
        self._queue: deque[_Run | StreamOperation | _Discard | _Commit] = deque()
        self._wait = RingWait(clock, ring_timeout_seconds, observer)
        self._last_requested = 0  # step ids, as are the next three
        self._last_answered = 0
        self._committed_through = 0
        self._last_published = 0
        self._announced_region = 0

    @property
    def deadline(self) -> float | None:
        """The clock's value at which `expire` is due, or None."""
        return self._wait.deadline

    def open(self) -> SessionReply:
        """Returns the first region."""
        return SessionReply(regions=self._announce_regions())

    @property
    def has_more(self) -> bool:
        """Whether `go_on` has something to do."""
        return bool(self._queue) and not self._wait.is_on

    def handle(self, message: SessionMessage, *, in_parts: bool = False) -> SessionReply:
        """Applies one message.

        Args:
            message: what the engine says.
            in_parts: leave plans to `go_on`: all but one if the engine has none left to run, and so waits for that one.

        Returns:
            What it brought; steps that still wait are answered by a later `handle` or `expire`.

        Raises:
            ProtocolError: the message breaks the protocol; close the session.
        """
        self._check(message)
        if self._ring.release_through(message.released_through) or message.committed_through > self._committed_through:
            self._wait.note_progress()
        self._ring.unlink_through(message.region_mapped)
        if message.committed_through > self._committed_through:
            self._committed_through = message.committed_through
            self._queue.append(_Commit(message.committed_through))
        if message.discard_from:
            self._cut_waiting(message.discard_from)
            self._queue.append(_Discard(message.discard_from))
        self._queue.extend(message.operations)
        for layout in message.layouts:
            self._queue.append(_Run(layout, layout.step_id, layout.step_id + layout.repeat))
            self._last_requested = layout.step_id + layout.repeat - 1
        last_to_run = min(self._last_published, (message.discard_from or _MAX_STEP_ID) - 1)
        is_idle = self._committed_through >= last_to_run
        return self._advance((1 if is_idle else PLANS_A_PART) if in_parts else None)

    def go_on(self) -> SessionReply:
        """Returns more of what a message handled in parts brought."""
        return self._advance(PLANS_A_PART)

    def expire(self) -> SessionReply:
        """Gives up the waiting step if its deadline has passed; later ones go on."""
        if not self._wait.is_due:
            return SessionReply()
        run = self._queue[0]
        assert isinstance(run, _Run)
        oldest = self._ring.leases[0]
        self._wait.end()
        failed = self._fail(run, RingTimeoutError(oldest.step_id, self._clock() - oldest.since_seconds))
        reply = self._advance(None)
        return SessionReply(reply.regions, (failed, *reply.results))

    def summarize(self) -> SessionSummary:
        """Returns the session in figures."""
        now = self._clock()
        return build_summary(self.name, self.options, self._opened_seconds, now, self._planner, self._ring)

    def dump(self) -> SessionDump:
        """Returns everything the session holds."""
        return build_dump(self.summarize(), self._planner, self._ring, self._clock())

    def drill_mismatch(self) -> None:
        """Makes the cached plan that is used next wrong, so that it is found; the full one is served as ever.

        Raises:
            DrillRefusedError: cached plans are not compared, there is none, or a drill is pending already.
        """
        self._planner.drill_mismatch()

    def check_integrity(self) -> None:
        """Asserts that pages, lengths and leases add up."""
        self._planner.check_integrity()
        self._ring.check_integrity()
        assert self._wait.is_on == bool(self._queue), "something waits without reason, or nothing does"

    def close(self) -> None:
        """Gives the session's memory up. May be called again."""
        self._queue.clear()
        self._wait.clear()
        self._ring.close()

    def _check(self, message: SessionMessage) -> None:
        for field in ("released_through", "committed_through"):
            step_id = getattr(message, field)
            if step_id > self._last_answered:
                raise ProtocolError(f"{field} is {step_id}, and only steps up to {self._last_answered} were answered")
        committed = max(message.committed_through, self._committed_through)
        if 0 < message.discard_from <= committed:
            raise ProtocolError(f"discard_from is {message.discard_from}, and steps up to {committed} are committed")
        if message.region_mapped > self._announced_region:
            raise ProtocolError(f"region_mapped is {message.region_mapped}, and there is no such region")
        last = self._last_requested
        for layout in message.layouts:
            if layout.step_id <= last:
                raise ProtocolError(f"step id {layout.step_id} does not rise: the last one was {last}")
            last = layout.step_id + max(layout.repeat, 1) - 1
            if last > _MAX_STEP_ID:
                raise ProtocolError(f"step id {last} is above {_MAX_STEP_ID}")

    def _cut_waiting(self, step_id: int) -> None:
        """Takes steps from `step_id` on out of the queue."""
        kept: deque[_Run | StreamOperation | _Discard | _Commit] = deque()
        for item in self._queue:
            if isinstance(item, _Run):
                item.end_step = min(item.end_step, step_id)
                if item.next_step >= item.end_step:
                    continue
            kept.append(item)
        if self._queue and (not kept or kept[0] is not self._queue[0]):
            self._wait.end()
        self._queue = kept

    def _advance(self, max_results: int | None) -> SessionReply:
        """Works the queue off, as far as free sets allow, or until there are so many results."""
        results: list[PlanReady | PlanFailed] = []
        while self._queue and len(results) != max_results:
            item = self._queue[0]
            if isinstance(item, _Run):
                result = self._try_step(item)
                if result is None:
                    has_more_to_run = self._committed_through < self._last_published
                    self._wait.go_on(WaitKind.BACKPRESSURE if has_more_to_run else WaitKind.STALL)
                    break
                results.append(result)
            else:
                self._apply(item)
                self._queue.popleft()
        return SessionReply(self._announce_regions(), tuple(results))

    def _apply(self, item: StreamOperation | _Discard | _Commit) -> None:
        if isinstance(item, _Commit):
            self._planner.commit_through(item.step_id)
        elif isinstance(item, _Discard):
            self._ring.release_from(item.step_id)
            num_discarded = self._planner.discard_from(item.step_id)
            self._last_published = min(self._last_published, item.step_id - 1)
            if num_discarded:
                self._observer.steps_discarded(num_discarded)
        else:
            self._planner.apply(item)

    def _try_step(self, run: _Run) -> PlanReady | PlanFailed | None:
        """Plans the next step of the run at the head of the queue; None if no set is free."""
        try:
            if run.rows is None:
                run.rows = self._planner.read(run.layout)
            if not self._ring.has_free_set():
                return None
            self._wait.end()
            return self._publish(run, run.rows)
        except LayoutError as error:
            return self._fail(run, error)

    def _publish(self, run: _Run, rows: LayoutRows) -> PlanReady:
        step_id = run.next_step
        started = self._clock()
        plan = self._planner.plan(rows, step_id, self._ring.find_free_set)
        now = self._clock()
        self._ring.lease(plan.buffer_set, step_id, now)
        report_plan(self._observer, plan, now - started)
        run.next_step += 1
        if run.next_step == run.end_step:
            self._queue.popleft()
        self._last_answered = self._last_published = step_id
        return describe_plan(step_id, plan)

    def _fail(self, run: _Run, error: LayoutError) -> PlanFailed:
        """Ends a run at the head of the queue whose next step has no plan."""
        self._queue.popleft()
        self._observer.layout_failed(error)
        self._last_answered = run.end_step - 1
        return PlanFailed(run.next_step, run.end_step - run.next_step, error)

    def _announce_regions(self) -> tuple[RegionDescription, ...]:
        # The ring may have grown more than once in one message, with plans in each region.
        regions = tuple([region.description for region in self._ring.list_regions_after(self._announced_region)])
        for region in regions:
            if self._announced_region:
                self._observer.region_grown()
            self._announced_region = region.region_id
        return regions
