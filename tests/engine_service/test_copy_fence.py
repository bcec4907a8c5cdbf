"""`copy_fence.py`: a buffer set goes back once its step has ended and its copies have been made, in step order."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.copy_fence import CopyFence
from engine_service.errors import CopyTimeoutError


@dataclass
class Clock:
    """Time that passes only while somebody sleeps."""

    seconds: float = 0.0
    num_sleeps: int = 0

    def read(self) -> float:
        """Returns the time."""
        return self.seconds

    def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        self.num_sleeps += 1
        self.seconds += seconds


@dataclass
class TimedEvent:
    """Is complete from a moment of a clock on."""

    clock: Clock
    at_seconds: float

    def query(self) -> bool:
        """Whether the moment has come."""
        return self.clock.seconds >= self.at_seconds

    def synchronize(self) -> None:
        """Lets time pass until then."""
        self.clock.seconds = max(self.clock.seconds, self.at_seconds)


@dataclass
class Bench:
    """A fence on a clock of its own; copies that take more than a second count as lost."""

    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.fence = CopyFence(1.0, clock=self.clock.read, sleep=self.clock.sleep)

    def copy(self, step_id: int, *at_seconds: float) -> None:
        """Begins copies of a step's plan that are made at these moments."""
        for moment in at_seconds:
            self.fence.add(step_id, TimedEvent(self.clock, moment))


@pytest.fixture
def bench() -> Bench:
    """A fence."""
    return Bench()


def test_a_set_goes_back_when_its_copy_has_been_made_and_its_step_has_ended(bench: Bench) -> None:
    """Neither alone will do."""
    bench.copy(1, 0.0)
    assert bench.fence.take_free() == 0
    bench.fence.end(1)
    assert bench.fence.take_free() == 1
    bench.copy(2, 0.5)
    bench.fence.end(2)
    assert bench.fence.take_free() == 0
    bench.clock.seconds = 0.5
    assert bench.fence.take_free() == 2
    assert bench.fence.take_free() == 0, "each goes back once"


def test_a_step_that_was_not_copied_goes_back_when_it_ends(bench: Bench) -> None:
    """A step that failed before its copy has nothing to wait for."""
    bench.fence.end(7)
    assert bench.fence.take_free() == 7


def test_a_late_copy_keeps_those_behind_it_back(bench: Bench) -> None:
    """Releases name a step and all before it, so they go in step order whatever order copies are made in."""
    bench.copy(1, 0.3)
    bench.copy(2, 0.1)
    bench.copy(3, 0.2)
    for step_id in (1, 2, 3):
        bench.fence.end(step_id)
    bench.clock.seconds = 0.25
    assert bench.fence.take_free() == 0
    assert bench.fence.is_holding
    assert bench.fence.oldest_step_id == 1
    bench.clock.seconds = 0.3
    assert bench.fence.take_free() == 3
    assert not bench.fence.is_holding
    assert bench.fence.oldest_step_id is None


def test_every_copy_of_a_step_counts(bench: Bench) -> None:
    """A set that several copies read goes back after the last of them."""
    bench.copy(1, 0.1, 0.4, 0.2)
    bench.fence.end(1)
    bench.clock.seconds = 0.3
    assert bench.fence.take_free() == 0
    bench.clock.seconds = 0.4
    assert bench.fence.take_free() == 1


def test_a_copy_that_is_never_made_is_an_error(bench: Bench) -> None:
    """It names the step and how long it was waited for; up to then nothing happens."""
    bench.copy(5, float("inf"))
    bench.fence.end(5)
    bench.clock.seconds = 1.0
    assert bench.fence.take_free() == 0
    bench.clock.seconds = 1.1
    with pytest.raises(CopyTimeoutError, match="step 5 has not been copied to the device in 1 s") as raised:
        bench.fence.take_free()
    assert (raised.value.step_id, raised.value.timeout_seconds) == (5, 1.0)


def test_a_step_that_still_runs_is_not_late(bench: Bench) -> None:
    """However long a step takes, only one that has ended keeps others back."""
    bench.copy(1, float("inf"))
    bench.clock.seconds = 60.0
    assert bench.fence.take_free() == 0


def test_waiting_is_for_a_step_and_those_before_it(bench: Bench) -> None:
    """Copies behind it may still be under way."""
    bench.copy(1, 0.2)
    bench.copy(2, 0.1)
    bench.copy(3, 0.9)
    bench.fence.wait(2)
    assert 0.2 <= bench.clock.seconds < 0.3
    bench.fence.wait_for_all()
    assert 0.9 <= bench.clock.seconds < 1.0


def test_waiting_for_what_is_never_made_ends_with_an_error(bench: Bench) -> None:
    """There is no hang."""
    bench.copy(1, float("inf"))
    with pytest.raises(CopyTimeoutError):
        bench.fence.wait_for_all()
    assert 1.0 < bench.clock.seconds < 1.1


def test_a_new_session_starts_at_its_own_first_step(bench: Bench) -> None:
    """Nothing of an earlier session is held back, or goes back, after `clear`."""
    bench.copy(90, float("inf"))
    bench.fence.end(90)
    bench.fence.clear()
    bench.fence.wait_for_all()
    bench.copy(1, 0.0)
    bench.fence.end(1)
    assert bench.fence.take_free() == 1


@given(
    copies=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=12),
    ended_at=st.lists(st.integers(0, 9), min_size=12, max_size=12),
)
def test_at_every_moment_the_sets_that_may_go_have_gone(
    copies: Sequence[Sequence[int]], ended_at: Sequence[int]
) -> None:
    """At each moment the last step released is the one before the first that has not ended or not been copied.

    Args:
        copies: for each step the moments at which its copies are made.
        ended_at: when each step ends, at the earliest; steps end in order.
    """
    bench = Bench()
    fence = CopyFence(1_000.0, clock=bench.clock.read, sleep=bench.clock.sleep)
    ends = [max(ended_at[: number + 1]) for number in range(len(copies))]
    for step_id, moments in enumerate(copies, 1):
        for moment in moments:
            fence.add(step_id, TimedEvent(bench.clock, moment))
    released = 0
    for moment in range(10):
        bench.clock.seconds = float(moment)
        last_ended = sum(end <= moment for end in ends)
        if last_ended:
            fence.end(last_ended)
        released = max(released, fence.take_free())
        late = [number for number in range(last_ended) if max(copies[number], default=0) > moment]
        free = min(late, default=last_ended)
        assert released <= free
        # A step without copies goes back together with the next one that has some.
        assert not any(copies[released:free])
