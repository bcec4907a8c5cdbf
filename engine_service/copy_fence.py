"""Which buffer sets may go back to the planner: those of steps that have ended and whose copies have been made."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engine_service.errors import CopyTimeoutError

POLL_SECONDS = 0.0005


class Event(Protocol):
    """A point in a stream's work. `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether all work before it has been done. Does not wait."""

    def synchronize(self) -> None:
        """Waits until all work before it has been done."""


@dataclass(slots=True)
class _Step:
    """A step whose set has not gone back.

    Args:
        step_id: the step.
        since_seconds: when its first copy began.
        events: what must be complete before its set may be written again; those that are known to be are taken out.
        has_ended: whether the host reads the set no more.
    """

    step_id: int
    since_seconds: float
    events: list[Event] = field(default_factory=list)
    has_ended: bool = False


class CopyFence:
    """Holds releases back, in step order, until the copies that read the buffer sets have been made.

    Used by the engine's thread alone.

    Args:
        timeout_seconds: a copy that has not been made for so long will never be.
        clock: tells seconds, never falling.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        timeout_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._sleep = sleep
        self._steps: deque[_Step] = deque()

    @property
    def is_holding(self) -> bool:
        """Whether a step has ended whose set has not gone back."""
        return bool(self._steps) and self._steps[0].has_ended

    @property
    def oldest_step_id(self) -> int | None:
        """The first step whose set has not gone back, or None."""
        return self._steps[0].step_id if self._steps else None

    def add(self, step_id: int, event: Event) -> None:
        """Says that a step's set may not be written again before an event.

        Args:
            step_id: the step, not before any that was named earlier.
            event: comes after something that reads the set.
        """
        self._note(step_id)
        assert self._steps[-1].step_id == step_id, "steps come in order"
        self._steps[-1].events.append(event)

    def end(self, step_id: int) -> None:
        """Says that the host no longer reads the sets of a step and of all before it."""
        self._note(step_id)
        for step in self._steps:
            step.has_ended = step.has_ended or step.step_id <= step_id

    def take_free(self) -> int:
        """Returns the last step whose set, and all sets before it, may go back now; 0 if there is no new one.

        Raises:
            CopyTimeoutError: the copy that keeps the others back has not been made for too long.
        """
        step_id = 0
        while self._steps and self._steps[0].has_ended and self._is_copied(self._steps[0]):
            step_id = self._steps.popleft().step_id
        if self.is_holding and self._clock() - self._steps[0].since_seconds > self._timeout_seconds:
            raise CopyTimeoutError(self._steps[0].step_id, self._timeout_seconds)
        return step_id

    def wait(self, step_id: int) -> None:
        """Waits until every copy of a step and of all before it has been made.

        Args:
            step_id: the step.

        Raises:
            CopyTimeoutError: one has not been made for too long.
        """
        for step in self._steps:
            if step.step_id > step_id:
                return
            while not self._is_copied(step):
                if self._clock() - step.since_seconds > self._timeout_seconds:
                    raise CopyTimeoutError(step.step_id, self._timeout_seconds)
                self._sleep(POLL_SECONDS)

    def wait_for_all(self) -> None:
        """Waits until every copy has been made.

        Raises:
            CopyTimeoutError: one has not been made for too long.
        """
        if self._steps:
            self.wait(self._steps[-1].step_id)

    def clear(self) -> None:
        """Forgets every step: their session has ended."""
        self._steps.clear()

    def _note(self, step_id: int) -> None:
        if not self._steps or self._steps[-1].step_id < step_id:
            self._steps.append(_Step(step_id, self._clock()))

    def _is_copied(self, step: _Step) -> bool:
        step.events = [event for event in step.events if not event.query()]
        return not step.events
