"""The inbox keeps step order across threads, and keeps nothing of steps that are over."""

import threading
from pathlib import Path

import pytest

from planner_service.client_inbox import PlanInbox
from planner_service.client_layout import Segment, build_layout
from planner_service.client_numbers import StreamNumbers
from planner_service.client_plan import Plan
from planner_service.errors import LayoutError
from ringplan.planner.v1 import planner_pb2 as pb
from tests.planner_service.scripted_planner import TIMEOUT_SECONDS, ScriptedPlanner, build_plan

ROWS = build_layout(StreamNumbers(1), [Segment("a", "main")]).labels
TWO_ROWS = build_layout(StreamNumbers(2), [Segment("a", "main"), Segment("b", "main")]).labels


@pytest.fixture
def inbox(tmp_path: Path) -> PlanInbox:
    """An inbox that has mapped its region."""
    inbox = PlanInbox(max_streams=2)
    assert inbox.take_regions([ScriptedPlanner(tmp_path).build_region()]) == 1
    return inbox


def _arrive(inbox: PlanInbox, *step_ids: int) -> None:
    inbox.take_results(pb.PlanResponse(plans=[build_plan(step_id) for step_id in step_ids]))


def _take(inbox: PlanInbox) -> int:
    result = inbox.take(TIMEOUT_SECONDS)
    assert isinstance(result, Plan)
    return result.step_id


def test_plans_have_the_rows_of_their_own_layout(inbox: PlanInbox) -> None:
    """A run's plans all have its rows, the next run's have theirs."""
    inbox.expect(range(1, 3), ROWS)
    inbox.expect(range(3, 4), TWO_ROWS)
    _arrive(inbox, 1, 2)
    inbox.take_results(pb.PlanResponse(plans=[build_plan(3, rows=(("main", 2),))]))
    rows = []
    for _ in range(3):
        result = inbox.take(TIMEOUT_SECONDS)
        assert isinstance(result, Plan)
        rows.append(len(result.labels["main"].rows))
    assert rows == [1, 1, 2]


def test_an_answer_to_a_step_that_is_over_is_refused(inbox: PlanInbox) -> None:
    """Answers come in step order; one for a step before the last is no answer."""
    inbox.expect(range(1, 2), ROWS)
    inbox.expect(range(2, 3), ROWS)
    _arrive(inbox, 2)
    with pytest.raises(ValueError, match="step 1, which nobody asked for"):
        _arrive(inbox, 1)


def test_outstanding_steps_are_counted_until_taken_or_discarded(inbox: PlanInbox) -> None:
    """Every submitted step is outstanding until its result is taken or it is cut off."""
    inbox.expect(range(1, 5), ROWS)
    inbox.expect(range(5, 9), ROWS)
    assert inbox.num_outstanding() == 8
    _arrive(inbox, 1, 2, 3)
    assert (inbox.num_ready(), inbox.num_outstanding()) == (3, 8)
    assert _take(inbox) == 1
    assert (inbox.num_ready(), inbox.num_outstanding()) == (2, 7)
    inbox.discard_from(3, 9)
    assert (inbox.num_ready(), inbox.num_outstanding()) == (1, 1)
    assert _take(inbox) == 2
    assert not inbox.has_outstanding()


def test_an_earlier_discard_reaches_behind_a_later_one(inbox: PlanInbox) -> None:
    """Cutting twice cuts at the earlier step, and what was submitted between them goes too."""
    inbox.expect(range(1, 5), ROWS)
    inbox.discard_from(3, 5)
    inbox.expect(range(5, 7), ROWS)
    inbox.discard_from(2, 7)
    inbox.expect(range(7, 8), ROWS)
    _arrive(inbox, 1, 2, 3, 5, 6, 7)
    assert [_take(inbox), _take(inbox)] == [1, 7]
    assert not inbox.has_outstanding()


def test_a_discarded_step_may_arrive_after_many_later_discards(inbox: PlanInbox) -> None:
    """However often the engine changes its mind meanwhile, what was cut stays cut."""
    for first in range(1, 40, 4):
        inbox.expect(range(first, first + 4), ROWS)
        inbox.discard_from(first + 1, first + 4)
    inbox.expect(range(41, 42), ROWS)
    _arrive(inbox, *range(1, 42))
    assert [_take(inbox) for _ in range(11)] == [*range(1, 41, 4), 41]
    assert not inbox.has_outstanding()


def test_discards_without_answers_do_not_pile_up(inbox: PlanInbox) -> None:
    """A planner that has answered nothing yet costs no more for steps that were all cut."""
    for first in range(1, 401, 4):
        inbox.expect(range(first, first + 4), ROWS)
        inbox.discard_from(first, first + 4)
    assert len(inbox._discarded) == 1
    inbox.expect(range(401, 402), ROWS)
    _arrive(inbox, 7, 8, 399, 401)
    assert _take(inbox) == 401


def test_nothing_is_kept_of_steps_that_are_over(inbox: PlanInbox) -> None:
    """Runs, discards and results do not pile up however long a session lives."""
    for first in range(1, 4001, 4):
        inbox.expect(range(first, first + 4), ROWS)
        _arrive(inbox, first, first + 1)
        assert _take(inbox) == first
        inbox.discard_from(first + 1, first + 4)
    for kept in (inbox._runs, inbox._discarded, inbox._ready, inbox._outstanding):
        assert len(kept) <= 2
    assert inbox._arrived.empty()


def test_a_wait_ends_when_the_stream_does(inbox: PlanInbox) -> None:
    """The engine's thread is woken with nothing, so that it can ask why."""
    inbox.expect(range(1, 2), ROWS)
    taken: list[Plan | LayoutError | None] = []
    waiting = threading.Thread(target=lambda: taken.append(inbox.take(None)))
    waiting.start()
    inbox.wake()
    waiting.join(TIMEOUT_SECONDS)
    assert taken == [None]


def test_a_result_may_come_while_the_engine_waits(inbox: PlanInbox) -> None:
    """The reader thread's plan reaches a thread that is already waiting, past one that was discarded."""
    inbox.expect(range(1, 3), ROWS)
    inbox.discard_from(2, 3)
    inbox.expect(range(3, 4), ROWS)
    reading = threading.Thread(target=_arrive, args=(inbox, 1, 2, 3))
    reading.start()
    assert [_take(inbox), _take(inbox)] == [1, 3]
    reading.join(TIMEOUT_SECONDS)
