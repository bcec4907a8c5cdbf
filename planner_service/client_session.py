"""A session as its engine sees it: steps go out without waiting, and finished plans come in."""

import queue
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Self

from planner_service.client_errors import PlannerUnavailableError, SessionLostError
from planner_service.client_inbox import PlanInbox
from planner_service.client_layout import CombinedLabel, ForkRequest, Layout, Segment, build_layout
from planner_service.client_numbers import StreamNumbers
from planner_service.client_pending import PendingRequest
from planner_service.client_plan import Plan
from planner_service.client_stream import PlanStream, StartCall
from planner_service.client_wire import read_cache_mode
from planner_service.errors import InvalidLayoutError, LayoutError
from planner_service.messages import CacheMode
from ringplan.planner.v1 import planner_pb2

MAX_REPEAT = 1_024


class PlannerSession:
    """One session with the planner, used by one thread; only `close` may be called from others.

    What changes state at the planner (`release`, `commit`, `discard_from`, `truncate`, `drop`) is buffered and goes out
    with the next `submit` or `flush`, in one message, or when `next_plan` has to wait. A reader thread turns the
    planner's responses into plans.

    Args:
        start_call: starts the Plan call.
        open_request: the session's first request.
        target: the planner's address, for messages.
        open_timeout_seconds: how long the planner may take to open the session.
        clock: seconds, never falling.

    Attributes:
        name: what the planner calls the session.
        planner_version: the planner's version.
        ring_depth: buffer sets in the ring: plans that can be held at once.
        cache_mode: the cache mode in use.

    Raises:
        PlannerUnavailableError: the planner did not open the session, or not in time.
    """

    def __init__(
        self,
        start_call: StartCall,
        open_request: planner_pb2.PlanRequest,
        *,
        target: str,
        open_timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        max_streams = open_request.open.max_streams
        self._numbers = StreamNumbers(max_streams)
        self._inbox = PlanInbox(max_streams)
        self._opened: queue.SimpleQueue[tuple[planner_pb2.SessionOpened, CacheMode] | None] = queue.SimpleQueue()
        self._pending = PendingRequest(clock)
        self._next_step_id = 1
        self._last_taken = 0  # the last step that next_plan answered
        self._last_plan = 0  # the last step that the engine got a plan of
        self._last_runnable = 0  # the last of those that it has not discarded
        self._last_committed = 0
        self._stream = PlanStream(start_call, self._take_response, self._take_end)
        self._stream.start(open_request)
        opened, self.cache_mode = self._wait_until_open(target, open_timeout_seconds)
        self.name = opened.session
        self.planner_version = opened.planner_version
        self.ring_depth = opened.ring_depth

    def build_layout(
        self,
        segments: Iterable[Segment],
        *,
        combined_labels: Sequence[CombinedLabel] = (),
        commit: bool = True,
        forks_before: Sequence[ForkRequest] = (),
        forks_after: Sequence[ForkRequest] = (),
    ) -> Layout:
        """Groups segments into plan labels, gives new streams their numbers and packs all that for the wire.

        The layout may be submitted any number of times until a request in it is dropped. The arguments are those of
        `client_layout.build_layout`.

        Raises:
            InvalidLayoutError: a rule is broken; no stream has got a number.
        """
        return build_layout(
            self._numbers,
            segments,
            combined_labels=combined_labels,
            commit=commit,
            forks_before=forks_before,
            forks_after=forks_after,
        )

    def submit(self, layout: Layout, *, repeat: int = 1) -> range:
        """Sends a layout to be planned, with everything that is buffered; does not wait.

        Args:
            layout: what to plan.
            repeat: for how many consecutive steps, 1 to 1,024; above 1 needs `commit` and no forks.

        Returns:
            The steps' ids.

        Raises:
            InvalidLayoutError: a rule is broken; nothing has been sent.
            SessionLostError: the session has ended.
            ProtocolError: the session has ended because a message broke the protocol.
        """
        self._stream.check_alive()
        layout.check_streams(self._numbers)
        if not 1 <= repeat <= MAX_REPEAT:
            raise InvalidLayoutError(f"repeat {repeat} is outside 1..{MAX_REPEAT}")
        if repeat > 1 and (layout.has_forks or not layout.commit):
            raise InvalidLayoutError(f"repeat {repeat} needs a layout that commits and has no forks")
        steps = range(self._next_step_id, self._next_step_id + repeat)
        self._next_step_id = steps.stop
        layout.message.step_id = steps.start
        layout.message.repeat = repeat
        self._pending.add_layout(layout)
        self._inbox.expect(steps, layout.labels)
        self._send_pending()
        return steps

    def next_plan(self, timeout_seconds: float | None = None) -> Plan:
        """Returns the plan of the next submitted step, in step order; sends what is buffered if it has to wait.

        Args:
            timeout_seconds: how long to wait; None waits as long as the session lives.

        Raises:
            LayoutError: the step, or a run of them, has no plan (`step_id`, `num_steps`): OutOfPagesError,
                InvalidLayoutError, UnknownStreamError, RingTimeoutError or RegionUnavailableError. Later steps go on.
            TimeoutError: no plan came in time; the step stays the next.
            ValueError: every submitted step has been taken or discarded: no plan will come.
            SessionLostError: the session has ended.
            ProtocolError: the session has ended because a message broke the protocol.
        """
        self._stream.check_alive()
        if not self._inbox.has_outstanding():
            raise ValueError("no submitted step is left to wait for")
        if not self._pending.is_empty and not self._inbox.num_ready():
            # The planner may be waiting for what is buffered here, a release above all.
            self._send_pending()
        result = self._inbox.take(timeout_seconds)
        if result is None:
            assert self._stream.ending is not None
            raise self._stream.ending
        if isinstance(result, LayoutError):
            self._last_taken = result.step_id + result.num_steps - 1
            raise result
        self._last_taken = self._last_plan = self._last_runnable = result.step_id
        return result

    def num_ready(self) -> int:
        """Returns how many results `next_plan` has without waiting, errors included."""
        return self._inbox.num_ready()

    def num_outstanding(self) -> int:
        """Returns how many submitted steps `next_plan` has not answered yet: ready ones and those still to come."""
        return self._inbox.num_outstanding()

    def release(self, step_id: int) -> None:
        """Ends the leases of a step and all before it: their arrays are not read any more. Buffered.

        Raises:
            ValueError: the step has not come from `next_plan` yet.
        """
        self._check_was_taken(step_id)
        # A step without a plan has no lease: the last plan before it is meant.
        self._pending.release(min(step_id, self._last_plan))

    def commit(self, step_id: int) -> None:
        """Says that a step and all before it have run. Buffered.

        Raises:
            ValueError: the step has not come from `next_plan` yet, or has been discarded.
        """
        self._check_was_taken(step_id)
        if self._last_runnable < step_id <= self._last_plan:
            raise ValueError(f"step {step_id} cannot be committed: it has been discarded")
        step_id = min(step_id, self._last_runnable)
        if step_id > self._last_committed:
            self._last_committed = step_id
            self._pending.commit(step_id)

    def discard_from(self, step_id: int) -> None:
        """Gives up a step and all submitted after it; `next_plan` never returns them. Buffered.

        Their leases end too: plans of theirs that `next_plan` has returned must not be read any more.

        Raises:
            ValueError: the step has been committed.
        """
        if step_id <= self._last_committed:
            raise ValueError(f"step {step_id} cannot be discarded: steps to {self._last_committed} are committed")
        if step_id >= self._next_step_id:
            return
        self._inbox.discard_from(step_id, self._next_step_id)
        self._last_runnable = min(self._last_runnable, step_id - 1)
        self._pending.discard_from(step_id)

    def truncate(self, request: Hashable, label: str, length: int) -> None:
        """Cuts a stream back to its first `length` tokens, at most its committed length. Buffered.

        Raises:
            ValueError: the length is negative, or not 0 for a stream that does not exist.
        """
        number = self._numbers.find((request, label))
        if length < 0 or (length and number is None):
            raise ValueError(f"request {request!r}, label {label!r} cannot be cut to {length} tokens")
        if number is not None:
            self._pending.truncate(number, length)

    def drop(self, request: Hashable) -> None:
        """Ends every stream of a request; their numbers may be used again at once. Buffered.

        A request without streams is no error: it may never have come into a layout.
        """
        numbers = self._numbers.drop(request)
        if numbers:
            self._pending.drop(numbers)

    def flush(self) -> None:
        """Sends what is buffered.

        Raises:
            SessionLostError: the session has ended.
            ProtocolError: the session has ended because a message broke the protocol.
        """
        self._stream.check_alive()
        if not self._pending.is_empty:
            self._send_pending()

    def flush_if_due(self) -> None:
        """Sends what is buffered if the planner may soon lack buffer sets for submitted steps; to be called a step.

        Half of the ring goes back in one message, which costs less than a message a step; with 2 or 3 sets, or steps of
        0.1 s and more, each step is one.

        Raises:
            SessionLostError: the session has ended.
            ProtocolError: the session has ended because a message broke the protocol.
        """
        self._stream.check_alive()
        if self._pending.is_due(self.ring_depth) and self._inbox.num_outstanding() > self._inbox.num_ready():
            self._send_pending()

    def close(self) -> None:
        """Ends the session and waits a short while for the planner to have ended it. May be called again.

        Plans taken before stay readable as memory, but nobody writes to it any more.
        """
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _check_was_taken(self, step_id: int) -> None:
        if not 0 < step_id <= self._last_taken:
            raise ValueError(f"step {step_id} has not come from next_plan: the last that has is {self._last_taken}")

    def _send_pending(self) -> None:
        self._stream.send(self._pending.take())

    def _wait_until_open(self, target: str, timeout_seconds: float) -> tuple[planner_pb2.SessionOpened, CacheMode]:
        try:
            opened = self._opened.get(timeout=timeout_seconds)
        except queue.Empty:
            self._stream.cancel()
            raise PlannerUnavailableError(target, f"no session was opened within {timeout_seconds} s") from None
        if opened is not None:
            return opened
        ending = self._stream.ending
        if isinstance(ending, SessionLostError):
            raise PlannerUnavailableError(target, ending.reason, ending.status)
        raise PlannerUnavailableError(target, str(ending))

    def _take_response(self, response: planner_pb2.PlanResponse) -> None:
        """In the reader thread."""
        newest_region = self._inbox.take_regions(response.regions)
        if newest_region:
            self._stream.send(planner_pb2.PlanRequest(region_mapped=newest_region))
        if response.HasField("opened"):
            self._inbox.check_regions()
            self._opened.put((response.opened, read_cache_mode(response.opened.cache_mode)))
        self._inbox.take_results(response)

    def _take_end(self) -> None:
        """In the reader thread."""
        self._opened.put(None)
        self._inbox.wake()
