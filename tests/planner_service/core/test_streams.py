"""The table of streams: what cached steps add is there for whoever looks, and pages go where the tables end."""

import numpy as np
import pytest

from planner_service.core.lead import Growth
from planner_service.core.pages import PagePool
from planner_service.core.streams import StreamTable, Touch
from planner_service.errors import OutOfPagesError

STREAMS = np.array([3, 1])


def _build_table(num_pages: int = 64) -> StreamTable:
    """Returns a table of four streams, of which stream 3 holds page 1 and stream 1 pages 2 and 3."""
    table = StreamTable(4, PagePool(num_pages))
    table.reserve(STREAMS, np.array([1, 2], dtype=np.int32))
    return table


def _build_growth(table: StreamTable) -> Growth:
    growth = Growth(STREAMS)
    table.find_places(growth, np.array([1, 2], dtype=np.int32))
    return growth


def _pages_of(table: StreamTable) -> list[list[int]]:
    return [table.tables.pages_of(stream).tolist() for stream in STREAMS.tolist()]


def test_cached_steps_are_in_the_columns_for_whoever_looks() -> None:
    """Three steps planned and two committed show in the streams' lengths and last step, and in no others."""
    table = _build_table()
    identities = table.length_identities[STREAMS]
    for step_id in (5, 6, 7):
        table.plan_cached(STREAMS, identities, step_id)
    assert [table.try_commit_cached(identities) for _ in range(2)] == [True, True]
    assert table.planned.tolist() == [0, 3, 0, 3, 0]
    assert table.committed.tolist() == [0, 2, 0, 2, 0]
    assert table.last_step.tolist() == [0, 7, 0, 7, 0]


def test_a_layout_is_not_committed_for_another() -> None:
    """A commit of a layout that is not the one planned last, or that was looked at since, is left to its step."""
    table = _build_table()
    identities, others = table.length_identities[STREAMS], table.length_identities[STREAMS]
    assert not table.try_commit_cached(identities)
    table.plan_cached(STREAMS, identities, 1)
    assert not table.try_commit_cached(others)
    table.plan_cached(np.array([0]), others, 2)
    assert not table.try_commit_cached(identities)
    assert table.planned.tolist() == [1, 1, 0, 1, 0]
    assert not table.try_commit_cached(others)


def test_streams_grow_at_the_ends_of_their_tables_first_in_first_out() -> None:
    """Pages come in the order of the streams, and stand in the tables for whoever looks, then and later."""
    table = _build_table()
    growth = _build_growth(table)
    for expected in ([4, 5], [6, 7]):
        pages = table.try_grow(growth)
        assert pages is not None
        assert pages.tolist() == expected
    assert _pages_of(table) == [[1, 4, 6], [2, 3, 5, 7]]
    assert table.try_grow(growth) is not None
    assert _pages_of(table) == [[1, 4, 6, 8], [2, 3, 5, 7, 9]]


def test_streams_do_not_grow_over_the_room_their_tables_have() -> None:
    """As soon as one table is full none grows; nothing is taken then."""
    table = _build_table()
    growth = _build_growth(table)
    room = int((table.tables.capacities[STREAMS] - [1, 2]).min())
    assert all(table.try_grow(growth) is not None for _ in range(room))
    num_free = table.pool.num_free
    assert table.try_grow(growth) is None
    assert table.pool.num_free == num_free
    assert [len(pages) for pages in _pages_of(table)] == [1 + room, 2 + room]


def test_streams_do_not_grow_at_places_that_were_moved() -> None:
    """Once any table has been moved, places have to be found again."""
    table = _build_table()
    growth = _build_growth(table)
    table.reserve(np.array([0]), np.array([20], dtype=np.int32))
    assert table.try_grow(growth) is None
    table.find_places(growth, np.array([1, 2], dtype=np.int32))
    assert table.try_grow(growth) is not None
    assert _pages_of(table) == [[1, 24], [2, 3, 25]]


def test_streams_that_hold_more_than_they_need_do_not_grow() -> None:
    """A page reserved by a discarded step is used before another one is taken."""
    table = _build_table()
    growth = Growth(STREAMS)
    table.find_places(growth, np.array([1, 1], dtype=np.int32))
    assert table.try_grow(growth) is None


def test_a_growth_taken_back_leaves_no_trace() -> None:
    """Pages stand at the front of the queue again, and the tables are as they were."""
    table = _build_table()
    growth = _build_growth(table)
    for num_kept in (0, 1):
        pages = table.try_grow(growth)
        assert pages is not None
        table.ungrow(growth, pages)
        assert table.pool.num_free == 60 - 2 * num_kept
        again = table.try_grow(growth)
        assert again is not None
        assert again.tolist() == pages.tolist()
    assert _pages_of(table) == [[1, 4, 6], [2, 3, 5, 7]]


def test_growths_that_are_taken_back_again_and_again_leave_nothing() -> None:
    """A step that is refused for want of memory, and asked for anew, costs none."""
    table = _build_table()
    growth = _build_growth(table)
    for _ in range(100):
        pages = table.try_grow(growth)
        assert pages is not None
        table.ungrow(growth, pages)
    assert table._growths == []


def test_streams_that_cannot_all_grow_do_not_grow() -> None:
    """Out of pages leaves pool and tables as they were."""
    table = _build_table(num_pages=5)
    growth = _build_growth(table)
    with pytest.raises(OutOfPagesError):
        table.try_grow(growth)
    assert table.pool.num_free == 1
    assert _pages_of(table) == [[1], [2, 3]]


def test_what_touched_a_stream_is_only_changed_with_the_count() -> None:
    """Nothing can be written past `touch`, by whose count the cache knows that nothing has changed."""
    table = _build_table()
    table.touch(STREAMS, Touch.DISCARDED)
    assert (table.touched.tolist(), table.num_touches) == ([0, -2, 0, -2, 0], 1)
    with pytest.raises(ValueError, match="read-only"):
        table.touched[0] = 1
