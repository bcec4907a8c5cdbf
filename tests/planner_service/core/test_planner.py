"""Planning: all or nothing, forks and their undoing, copy on write, and when pages come back."""

from dataclasses import replace

import numpy as np
import pytest

from planner_service.core.layout import Drop, Fork, Int32Array, StepLayout, Truncate
from planner_service.core.planner import Planner
from planner_service.core.ring import BufferSet
from planner_service.errors import OutOfPagesError
from planner_service.messages import MAX_SLOTS, PlanFailed, SessionMessage, SessionOptions
from tests.planner_service.mirrored_session import MirroredSession
from tests.reference.naive_planner import NaivePlanner, pack_int32, pack_rows

OPTIONS = SessionOptions(page_size=4, num_pages=16, max_streams=8, ring_depth=16)


def step_of(step_id: int, *rows: tuple[int, int], commit: bool = True) -> StepLayout:
    """Returns a layout of one plan label."""
    return StepLayout(step_id, (pack_rows("main", rows),), commit=commit)


def send(session: MirroredSession, *layouts: StepLayout, operations: tuple[Truncate | Drop, ...] = ()) -> None:
    """Sends layouts; everything that comes back is compared with the naive planner's."""
    session.send(SessionMessage(operations=operations, layouts=layouts))


def commit(session: MirroredSession, step_id: int) -> None:
    """Runs and commits steps: the simulated cache shows whether they read what they should."""
    session.send(SessionMessage(committed_through=step_id, released_through=step_id))


def test_a_plan_is_the_one_of_the_design() -> None:
    """The worked example of the array definitions, through the session."""
    session = MirroredSession(OPTIONS)
    send(session, step_of(1, (0, 5), (1, 8)), step_of(2, (0, 1), (1, 1), (-1, 1)))
    assert session.in_flight[2].arrays["main"] == {
        "qo_indptr": [0, 1, 2, 3],
        "paged_kv_indptr": [0, 2, 5, 6],
        "paged_kv_indices": [1, 2, 3, 4, 5, 0],
        "paged_kv_last_page_len": [2, 1, 1],
        "kv_lens": [6, 9, 1],
        "slot_mapping": [9, 20, 0],
        "positions": [5, 8, 0],
    }


def test_pages_are_handed_out_in_the_page_order() -> None:
    """Where a layout names an order, rows get their pages in it, and stand where they stood."""
    session = MirroredSession(OPTIONS)
    labels = (pack_rows("both", [(0, 4), (1, 4)]), pack_rows("img", [(-1, 1), (2, 4)]))
    send(session, StepLayout(1, labels, page_order=pack_int32([3, 1, 2, 0])))
    arrays = session.in_flight[1].arrays
    assert arrays["both"]["paged_kv_indices"] == [3, 2]
    assert arrays["img"]["paged_kv_indices"] == [0, 1]


@pytest.mark.parametrize(
    ("layout", "num_short"),
    [
        (step_of(9, (1, 20)), 3),
        (replace(step_of(9, (1, 8)), forks_before=(Fork(0, 2), Fork(0, 3), Fork(0, 4))), 3),
        (replace(step_of(9, (1, 8)), forks_after=(Fork(0, 2), Fork(0, 3), Fork(0, 4))), 3),
        (replace(step_of(9, (1, 8)), forks_before=(Fork(0, 2), Fork(0, 3)), forks_after=(Fork(0, 4),)), 3),
    ],
)
def test_a_refusal_counts_every_missing_page_and_changes_nothing(layout: StepLayout, num_short: int) -> None:
    """Pages of forks and of rows are counted together; tables and the order of free pages stay."""
    session = MirroredSession(replace(OPTIONS, num_pages=10))
    send(session, step_of(1, (0, 26)))  # two pages are left
    before = session.session.dump()
    (failed,) = session.send(SessionMessage(layouts=(layout,))).results
    assert isinstance(failed, PlanFailed)
    assert isinstance(failed.error, OutOfPagesError)
    assert failed.error.num_short == num_short
    assert session.session.dump() == before
    send(session, step_of(10, (1, 5)))
    assert session.in_flight[10].arrays["main"]["paged_kv_indices"] == [8, 9]


def test_reserved_pages_stay_with_the_stream_after_a_discard() -> None:
    """A discarded step leaves its pages, and the stream's next step writes them."""
    session = MirroredSession(OPTIONS)
    send(session, step_of(1, (0, 9)))
    session.send(SessionMessage(discard_from=1))
    (stream,) = session.session.dump().streams
    assert (stream.planned_length, stream.pages) == (0, (1, 2, 3))
    send(session, step_of(2, (1, 1)), step_of(3, (0, 5)))
    assert session.in_flight[3].arrays["main"]["paged_kv_indices"] == [1, 2]
    session.check_all_is_free()


def test_pages_reserved_by_a_stream_that_a_later_fork_replaced_in_the_same_step_are_not_lost() -> None:
    """A discarded step whose forks replace a stream it used first leaves that stream, and a drop frees its pages."""
    session = MirroredSession(OPTIONS)
    send(session, replace(step_of(1, (4, 1)), forks_after=(Fork(2, 4),)))
    session.send(SessionMessage(discard_from=1))
    assert [stream.stream for stream in session.session.dump().streams] == [4]
    session.check_all_is_free()


def test_a_step_that_keeps_nothing_writes_the_same_place_again() -> None:
    """Without commit lengths stay, the page stays, and the next step overwrites."""
    session = MirroredSession(OPTIONS)
    send(session, step_of(1, (0, 4)), step_of(2, (0, 1), commit=False), step_of(3, (0, 1)))
    assert session.in_flight[2].arrays == session.in_flight[3].arrays
    commit(session, 3)
    session.check_all_is_free()


def test_pages_of_a_dropped_stream_come_back_when_its_steps_have_ended() -> None:
    """A drop with steps in flight frees nothing until they are committed."""
    session = MirroredSession(OPTIONS)
    send(session, step_of(1, (0, 4)), step_of(2, (0, 1)), step_of(3, (1, 1)))
    send(session, operations=(Drop(pack_int32([0])),))
    assert session.session.summarize().num_free_pages == 12
    commit(session, 1)
    assert session.session.summarize().num_free_pages == 12
    commit(session, 2)
    assert session.session.summarize().num_free_pages == 14


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    """After a fork and a cut into a shared page, both streams read their own tokens."""
    session = MirroredSession(OPTIONS)
    send(session, step_of(1, (0, 8)), replace(step_of(2, (0, 1)), forks_before=(Fork(0, 1),)))
    commit(session, 2)
    cut = (Truncate(0, 6), Truncate(1, 5))
    send(session, step_of(3, (0, 1), (1, 1)), operations=cut)
    assert len(session.in_flight[3].handle.page_copies_before) == 16
    commit(session, 3)
    send(session, step_of(4, (0, 2), (1, 4)))
    commit(session, 4)
    session.check_all_is_free()


def test_a_discarded_copy_of_a_shared_page_is_undone() -> None:
    """The copy never ran, so the stream reads the shared page again, also when it was cut meanwhile."""
    session = MirroredSession(OPTIONS)
    send(session, step_of(1, (0, 8)), replace(step_of(2, (0, 1)), forks_before=(Fork(0, 1),)))
    commit(session, 2)
    send(session, step_of(3, (0, 1)), operations=(Truncate(0, 7),))
    send(session, operations=(Truncate(0, 5),))
    session.send(SessionMessage(discard_from=3))
    send(session, step_of(4, (0, 0)))
    assert session.in_flight[4].arrays["main"]["paged_kv_indices"] == [1, 2]
    commit(session, 4)
    session.check_all_is_free()


def test_a_discarded_fork_gives_the_target_its_table_back() -> None:
    """Length, pages and the order of free pages are those from before the fork."""
    session = MirroredSession(OPTIONS)
    send(session, step_of(1, (0, 6), (1, 9)))
    commit(session, 1)
    before = session.session.dump().streams
    send(session, replace(step_of(2, (1, 0)), forks_before=(Fork(0, 1),)), step_of(3, (1, 5)))
    session.send(SessionMessage(discard_from=2))
    assert session.session.dump().streams == before
    send(session, step_of(4, (1, 1)))
    commit(session, 4)
    session.check_all_is_free()


def test_a_cut_of_a_forked_stream_stands_when_the_fork_is_discarded() -> None:
    """Once it was cut, no step in flight moves a stream's length, not even by being undone."""
    session = MirroredSession(OPTIONS)
    send(session, step_of(1, (0, 6), (1, 9)))
    commit(session, 1)
    send(session, replace(step_of(2, (0, 1)), forks_after=(Fork(0, 1),)))
    send(session, operations=(Truncate(1, 0),))
    session.send(SessionMessage(discard_from=2))
    assert session.committed_length(1) == 0
    session.check_all_is_free()


def test_a_fork_shares_what_steps_in_flight_will_fill() -> None:
    """A page that is full once the planned steps have run is shared, not copied."""
    session = MirroredSession(OPTIONS)
    send(session, step_of(1, (0, 7)), step_of(2, (0, 1)))
    send(session, replace(step_of(3, (1, 1)), forks_before=(Fork(0, 1),)))
    assert session.session.summarize().num_shared_pages == 2
    assert session.in_flight[3].handle.page_copies_before == b""
    commit(session, 3)
    session.check_all_is_free()


def test_a_length_past_int32_is_out_of_pages() -> None:
    """In the largest pool there can be, the longest span of the longest stream finds no pages, and nothing wraps."""
    num_pages = MAX_SLOTS // 65_536
    planner = Planner(page_size=65_536, num_pages=num_pages, max_streams=1)
    items: Int32Array = np.zeros(1 << 16, dtype=np.int32)

    def find_set(_: int) -> BufferSet:
        return BufferSet(1, 0, items)

    planner.plan(planner.read(step_of(1, (0, 1))), 1, find_set)
    planner.commit_through(1)
    # As long prefills that fill the pool would have left it.
    planner.streams.reserve(np.array([0]), np.array([num_pages - 1], dtype=np.int32))
    planner.streams.planned[0] = planner.streams.committed[0] = (num_pages - 1) * 65_536
    with pytest.raises(OutOfPagesError):
        planner.plan(planner.read(step_of(2, (0, 1 << 24))), 2, find_set)


def test_the_naive_planner_agrees_that_pages_go_out_first_in_first_out() -> None:
    """Freed pages come back after all that were free, in page-table order, in both planners."""
    naive = NaivePlanner(4, 8)
    session = MirroredSession(replace(OPTIONS, num_pages=8))
    for layout in (step_of(1, (0, 8)), step_of(2, (1, 8))):
        naive.plan(layout)
        send(session, layout)
    naive.commit(2)
    commit(session, 2)
    naive.drop(1)
    naive.drop(0)
    send(session, step_of(3, (2, 28)), operations=(Drop(pack_int32([1, 0])),))
    expected = [5, 6, 7, 3, 4, 1, 2]
    assert naive.plan(step_of(3, (2, 28))).arrays["main"]["paged_kv_indices"] == expected
    assert session.in_flight[3].arrays["main"]["paged_kv_indices"] == expected


def test_pages_of_a_cut_fork_that_was_discarded_wait_for_no_step() -> None:
    """Steps before the fork, and those planned after the discard, do not name them."""
    session = MirroredSession(OPTIONS)
    send(session, step_of(1, (0, 1)), step_of(2, (0, 1)))
    send(session, replace(step_of(3, (0, 1)), forks_before=(Fork(0, 1),)))
    send(session, step_of(4, (1, 8)), operations=(Truncate(1, 0),))
    session.send(SessionMessage(discard_from=3))
    send(session, step_of(5, (0, 1)))
    send(session, operations=(Drop(pack_int32([1])),))
    assert session.session.summarize().num_free_pages == OPTIONS.num_pages - 2


def test_pages_of_a_dropped_stream_wait_for_steps_that_name_them_alone() -> None:
    """A discard of the last of these leaves the others, and later steps do not matter."""
    session = MirroredSession(OPTIONS)
    send(session, step_of(1, (0, 5)), step_of(2, (1, 1)), step_of(3, (0, 1)))
    session.send(SessionMessage(discard_from=3))
    send(session, step_of(5, (1, 1)), operations=(Drop(pack_int32([0])),))
    assert session.session.summarize().num_free_pages == OPTIONS.num_pages - 4
    commit(session, 2)
    assert session.session.summarize().num_free_pages == OPTIONS.num_pages - 2
