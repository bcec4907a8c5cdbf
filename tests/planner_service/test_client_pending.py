"""What is buffered grows into one message, and is due when the planner may soon lack buffer sets."""

import pytest

from planner_service.client_pending import MAX_HOLD_SECONDS, PendingRequest
from ringplan.planner.v1 import planner_pb2 as pb
from tests.planner_service.mirrored_session import FakeClock


def test_everything_goes_into_one_message_and_the_next_is_empty() -> None:
    """Releases and commits keep their highest step, a discard its lowest, operations their order."""
    pending = PendingRequest(FakeClock())
    assert pending.is_empty
    pending.release(3)
    pending.release(2)
    pending.commit(4)
    pending.discard_from(9)
    pending.discard_from(7)
    pending.truncate(5, 20)
    pending.drop([1, 2])
    assert not pending.is_empty
    assert pending.take() == pb.PlanRequest(
        released_through=3,
        committed_through=4,
        discard_from=7,
        operations=[
            pb.StreamOperation(truncate=pb.TruncateStream(stream=5, length=20)),
            pb.StreamOperation(drop=pb.DropStreams(streams=bytes([1, 0, 0, 0, 2, 0, 0, 0]))),
        ],
    )
    assert pending.is_empty
    assert pending.take() == pb.PlanRequest()


@pytest.mark.parametrize(("ring_depth", "num_steps"), [(2, 1), (3, 2), (4, 2), (8, 4), (9, 5), (16, 8)])
def test_half_a_ring_of_releases_is_due(ring_depth: int, num_steps: int) -> None:
    """A message a step in the smallest ring, a message every half ring in larger ones, again after each message."""
    pending = PendingRequest(FakeClock())
    due = []
    for step_id in range(1, 3 * num_steps + 1):
        pending.commit(step_id)
        pending.release(step_id)
        if pending.is_due(ring_depth):
            due.append(step_id)
            pending.take()
    assert due == [num_steps, 2 * num_steps, 3 * num_steps]


def test_what_was_released_before_is_not_due_again() -> None:
    """Only an end of a lease that is news counts."""
    pending = PendingRequest(FakeClock())
    pending.release(4)
    pending.take()
    pending.release(4)
    assert pending.is_empty
    assert not pending.is_due(8)


def test_slow_steps_are_due_at_once() -> None:
    """The planner's time-out for a set runs while a release is kept back, so that is never for long."""
    clock = FakeClock()
    pending = PendingRequest(clock)
    pending.release(1)
    assert not pending.is_due(16)
    clock.now += 2 * MAX_HOLD_SECONDS
    assert pending.is_due(16)
    pending.take()
    pending.release(2)
    assert not pending.is_due(16)


def test_nothing_is_never_due() -> None:
    """Time alone sends no message."""
    clock = FakeClock()
    pending = PendingRequest(clock)
    clock.now += 10 * MAX_HOLD_SECONDS
    assert not pending.is_due(2)
