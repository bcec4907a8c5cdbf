"""Page tables in one arena against a dict of lists."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from planner_service.core.page_tables import PageTables

NUM_STREAMS = 6
stream_numbers = st.integers(0, NUM_STREAMS - 1)


def test_a_table_that_outgrows_its_extent_keeps_its_pages() -> None:
    """Pages stand in order however often a table moves."""
    tables = PageTables(2)
    for page in range(1, 3_000):
        tables.append(np.array([page % 2]), np.array([1], dtype=np.int32), np.array([page], dtype=np.int32))
    assert tables.pages_of(0).tolist() == list(range(2, 3_000, 2))
    assert tables.pages_of(1).tolist() == list(range(1, 3_000, 2))


def test_the_sink_table_is_zeros_as_long_as_asked_for() -> None:
    """Padding rows of any length read the sink page, also after the arena has been used by others."""
    tables = PageTables(2)
    tables.append(np.array([0]), np.array([64], dtype=np.int32), np.arange(1, 65, dtype=np.int32))
    tables.remove(0)
    tables.reserve_sink(60)
    assert tables.num_held[-1] >= 60
    assert not tables.pages_of(-1).any()


def test_memory_grows_with_pages_held_not_with_streams() -> None:
    """A table for many streams that hold nothing takes no arena beyond the first."""
    tables = PageTables(1 << 16)
    assert tables.arena.nbytes < 1 << 16


class TablesAgainstLists(RuleBasedStateMachine):
    """Every operation does to the tables what it does to plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = PageTables(NUM_STREAMS)
        self.lists: dict[int, list[int]] = {stream: [] for stream in range(NUM_STREAMS)}
        self.next_page = 1

    def _make_pages(self, count: int) -> list[int]:
        self.next_page += count
        return list(range(self.next_page - count, self.next_page))

    @rule(counts=st.dictionaries(stream_numbers, st.integers(1, 40), min_size=1))
    def append(self, counts: dict[int, int]) -> None:
        """Appends to several tables at once."""
        pages: list[int] = []
        for stream, count in counts.items():
            new = self._make_pages(count)
            self.lists[stream] += new
            pages += new
        self.tables.append(
            np.array(list(counts), dtype=np.intp),
            np.array(list(counts.values()), dtype=np.int32),
            np.array(pages, dtype=np.int32),
        )

    @rule(stream=stream_numbers, count=st.integers(0, 40))
    def replace(self, stream: int, count: int) -> None:
        """Puts other pages in a table's place."""
        self.lists[stream] = self._make_pages(count)
        self.tables.replace(stream, np.array(self.lists[stream], dtype=np.int32))

    @rule(stream=stream_numbers, data=st.data())
    def cut(self, stream: int, data: st.DataObject) -> None:
        """Cuts a table."""
        kept = data.draw(st.integers(0, len(self.lists[stream])))
        assert self.tables.cut(stream, kept).tolist() == self.lists[stream][kept:]
        del self.lists[stream][kept:]

    @rule(stream=stream_numbers)
    def remove(self, stream: int) -> None:
        """Removes a table."""
        assert self.tables.remove(stream).tolist() == self.lists[stream]
        self.lists[stream] = []

    @rule(stream=stream_numbers, data=st.data())
    def set_page(self, stream: int, data: st.DataObject) -> None:
        """Replaces one page."""
        if self.lists[stream]:
            index = data.draw(st.integers(0, len(self.lists[stream]) - 1))
            (page,) = self._make_pages(1)
            self.lists[stream][index] = page
            self.tables.set_page(stream, index, page)

    @rule(count=st.integers(0, 300))
    def reserve_sink(self, count: int) -> None:
        """Lengthens the sink's table."""
        self.tables.reserve_sink(count)
        assert self.tables.num_held[-1] >= count

    @invariant()
    def tables_are_the_lists(self) -> None:
        """Every table holds what its list holds, and the sink's only zeros."""
        for stream, pages in self.lists.items():
            assert self.tables.num_held[stream] == len(pages)
            assert self.tables.pages_of(stream).tolist() == pages
        assert not self.tables.pages_of(-1).any()


TablesAgainstLists.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestTablesAgainstLists = TablesAgainstLists.TestCase
