"""What an engine has said and its planner has not been told yet: one message, growing until it is sent."""

from collections.abc import Callable

from planner_service.client_layout import Layout, pack_int32
from ringplan.planner.v1 import planner_pb2

# Releases may be kept back while other buffer sets are free, but the planner's time-out for a set runs meanwhile.
MAX_HOLD_SECONDS = 0.1


class PendingRequest:
    """The next message to the planner. Used by the engine's thread alone.

    Args:
        clock: seconds, never falling.

    Attributes:
        is_empty: whether there is nothing to send.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_empty = True
        self._clock = clock
        self._request = planner_pb2.PlanRequest()
        self._taken_seconds = clock()
        self._released = self._sent_released = 0
        self._committed = self._sent_committed = 0

    def release(self, step_id: int) -> None:
        """Adds the end of the leases of a step and all before it."""
        if step_id > self._released:
            self._released = step_id
            self.is_empty = False

    def commit(self, step_id: int) -> None:
        """Adds that a step and all before it have run."""
        if step_id > self._committed:
            self._committed = step_id
            self.is_empty = False

    def discard_from(self, step_id: int) -> None:
        """Adds that a step and all after it are given up."""
        request = self._request
        request.discard_from = min(request.discard_from or step_id, step_id)
        self.is_empty = False

    def truncate(self, stream: int, length: int) -> None:
        """Adds that a stream is cut."""
        self._request.operations.add(truncate=planner_pb2.TruncateStream(stream=stream, length=length))
        self.is_empty = False

    def drop(self, streams: list[int]) -> None:
        """Adds that streams end."""
        self._request.operations.add(drop=planner_pb2.DropStreams(streams=pack_int32(streams)))
        self.is_empty = False

    def add_layout(self, layout: Layout) -> None:
        """Adds what is to be planned."""
        self._request.layouts.append(layout.message)
        self.is_empty = False

    def is_due(self, ring_depth: int) -> bool:
        """Whether the planner should be told now, since it may lack buffer sets soon.

        That is when half of the ring's sets have been released and not sent, or nothing has been sent for a while.

        Args:
            ring_depth: buffer sets in the ring.
        """
        if self.is_empty:
            return False
        is_half = 2 * (self._released - self._sent_released) >= ring_depth
        return is_half or self._clock() - self._taken_seconds >= MAX_HOLD_SECONDS

    def take(self) -> planner_pb2.PlanRequest:
        """Returns the message, and begins another."""
        request, self._request = self._request, planner_pb2.PlanRequest()
        if self._released > self._sent_released:
            self._sent_released = request.released_through = self._released
        if self._committed > self._sent_committed:
            self._sent_committed = request.committed_through = self._committed
        self.is_empty = True
        self._taken_seconds = self._clock()
        return request
