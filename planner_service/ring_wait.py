"""The wait of a session's next step for a buffer set."""

from collections.abc import Callable

from planner_service.messages import WaitKind
from planner_service.observer import SessionObserver


class RingWait:
    """Times waits and tells them apart: a stall is one that the engine has nothing left to run in.

    Args:
        clock: seconds, never falling.
        timeout_seconds: how long a step waits after the engine's last release or commit.
        observer: is told of every wait that ended.

    Attributes:
        deadline: the clock's value at which the waiting step is given up, or None while nothing waits.
    """

    def __init__(self, clock: Callable[[], float], timeout_seconds: float, observer: SessionObserver) -> None:
        self.deadline: float | None = None
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._observer = observer
        self._kind: WaitKind | None = None
        self._since_seconds = 0.0

    @property
    def is_on(self) -> bool:
        """Whether a step waits."""
        return self._kind is not None

    @property
    def is_due(self) -> bool:
        """Whether the waiting step is to be given up."""
        return self.deadline is not None and self._clock() >= self.deadline

    def go_on(self, kind: WaitKind) -> None:
        """Notes that the step waits, still or from now on; back-pressure may turn into a stall."""
        now = self._clock()
        if self._kind is not kind:
            self.end()
            self._kind = kind
            self._since_seconds = now
        if self.deadline is None:
            self.deadline = now + self._timeout_seconds

    def note_progress(self) -> None:
        """Notes that the engine released or committed something: it gets the whole time again."""
        if self._kind is not None:
            self.deadline = self._clock() + self._timeout_seconds

    def end(self) -> None:
        """Notes that nothing waits any more."""
        if self._kind is not None:
            self._observer.ring_waited(self._kind, self._clock() - self._since_seconds)
        self.clear()

    def clear(self) -> None:
        """Forgets the wait without telling anyone."""
        self._kind = None
        self.deadline = None
