"""Page tables of many streams in one arena: memory grows with the pages held, and gathers need no Python loop."""

import numpy as np
import numpy.typing as npt

from planner_service.core.layout import Int32Array

IntArray = npt.NDArray[np.intp]
_FIRST_ARENA = 1_024
_FIRST_SINK = 16
_ROOM = 4  # a table that is moved gets room for so many pages more: after a prefill come decodes


class PageTables:
    """One page table a stream, each a contiguous extent of the arena with room to grow.

    Extents are powers of two and reused by size. Index -1 of every column is the sink's table: zeros, as many as
    the longest padding row needs, so padding rows are gathered like any other.

    Args:
        max_streams: streams are numbered 0 to `max_streams - 1`.

    Attributes:
        arena: the pages of all tables, int32.
        starts: where each stream's table starts in the arena, intp [max_streams + 1].
        num_held: the pages in each table, int32 [max_streams + 1].
        capacities: the pages each has room for where it starts, int32 [max_streams + 1].
        num_moves: how often tables have been moved; what was found out of starts and capacities holds until then.
    """

    def __init__(self, max_streams: int) -> None:
        self.arena: Int32Array = np.zeros(_FIRST_ARENA, dtype=np.int32)
        self.starts: IntArray = np.zeros(max_streams + 1, dtype=np.intp)
        self.num_held: Int32Array = np.zeros(max_streams + 1, dtype=np.int32)
        self.capacities: Int32Array = np.zeros(max_streams + 1, dtype=np.int32)
        self.num_moves = 0
        self._free_starts: dict[int, list[int]] = {}  # by capacity
        self._arena_used = 0
        self.reserve_sink(_FIRST_SINK)

    def reserve_sink(self, num_pages: int) -> None:
        """Makes the sink's table at least this long."""
        if num_pages > self.num_held[-1]:
            sink = np.array([-1], dtype=np.intp)
            self._grow(sink, np.array([num_pages]))
            self.num_held[-1] = self.capacities[-1]
            self.arena[self.starts[-1] : self.starts[-1] + self.num_held[-1]] = 0

    def pages_of(self, stream: int) -> Int32Array:
        """Returns a copy of one stream's table, int32 [num_held]."""
        start = self.starts[stream]
        return self.arena[start : start + self.num_held[stream]].copy()

    def read(self, streams: IntArray, indices: IntArray | Int32Array) -> Int32Array:
        """Returns one page of each table, int32 [n].

        Args:
            streams: the streams, intp [n].
            indices: the place of the page in each table, [n].
        """
        pages: Int32Array = self.arena[self.starts[streams] + indices]
        return pages

    def append(self, streams: IntArray, counts: Int32Array, pages: Int32Array) -> None:
        """Appends pages to tables.

        Args:
            streams: the streams, all different, intp [n].
            counts: how many pages each gets, int32 [n], each at least 1.
            pages: the pages, in the order of the streams, int32 [sum of counts].
        """
        held = self.num_held[streams]
        wanted = held + counts
        is_full = wanted > self.capacities[streams]
        if np.count_nonzero(is_full):
            self._grow(streams[is_full], wanted[is_full])
        places = self.starts[streams] + held
        self.arena[places if len(pages) == len(streams) else _ragged(places, counts)] = pages
        self.num_held[streams] = wanted

    def replace(self, stream: int, pages: Int32Array) -> None:
        """Makes this the stream's table; what it held is the caller's."""
        self.num_held[stream] = 0
        if len(pages):
            self.append(np.array([stream], dtype=np.intp), np.array([len(pages)], dtype=np.int32), pages)

    def set_page(self, stream: int, index: int, page: int) -> None:
        """Puts another page at one place of a table."""
        self.arena[self.starts[stream] + index] = page

    def cut(self, stream: int, num_pages: int) -> Int32Array:
        """Shortens a table and returns the pages cut off, in order."""
        start = self.starts[stream]
        cut_pages = self.arena[start + num_pages : start + self.num_held[stream]].copy()
        self.num_held[stream] = num_pages
        return cut_pages

    def remove(self, stream: int) -> Int32Array:
        """Empties a table, gives its extent up and returns its pages, in order."""
        pages = self.cut(stream, 0)
        capacity = int(self.capacities[stream])
        if capacity:
            self._free_starts.setdefault(capacity, []).append(int(self.starts[stream]))
            self.capacities[stream] = 0
        return pages

    def _grow(self, streams: IntArray, wanted: npt.NDArray[np.integer]) -> None:
        """Moves tables to extents that hold `wanted` pages; loops over extent sizes, not over streams."""
        capacities = np.left_shift(1, np.ceil(np.log2(wanted + _ROOM)).astype(np.int32), dtype=np.int32)
        new_starts = np.empty(len(streams), dtype=np.intp)
        for capacity in set(capacities.tolist()):  # np.unique imports a module of 3 MB, at the first plan
            is_size = capacities == capacity
            new_starts[is_size] = self._take_extents(capacity, int(np.count_nonzero(is_size)))
        held = self.num_held[streams]
        self.arena[_ragged(new_starts, held)] = self.arena[_ragged(self.starts[streams], held)]
        old_capacities = self.capacities[streams]
        for capacity in set(old_capacities[old_capacities > 0].tolist()):
            self._free_starts.setdefault(capacity, []).extend(self.starts[streams[old_capacities == capacity]].tolist())
        self.num_moves += 1
        self.starts[streams] = new_starts
        self.capacities[streams] = capacities

    def _take_extents(self, capacity: int, count: int) -> IntArray:
        free = self._free_starts.get(capacity, [])
        num_reused = min(count, len(free))
        reused = free[len(free) - num_reused :]
        del free[len(free) - num_reused :]
        num_new = count - num_reused
        first = self._arena_used
        self._arena_used += num_new * capacity
        if self._arena_used > len(self.arena):
            grown = np.zeros(max(self._arena_used, 2 * len(self.arena)), dtype=np.int32)
            grown[:first] = self.arena[:first]
            self.arena = grown
        fresh = first + np.arange(num_new, dtype=np.intp) * capacity
        return np.concatenate((np.array(reused, dtype=np.intp), fresh))


def _ragged(starts: IntArray, counts: npt.NDArray[np.integer]) -> IntArray:
    """Returns the indices of the ranges `starts[i] : starts[i] + counts[i]`, one after another."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    result: IntArray = np.repeat(starts - (ends - counts), counts) + np.arange(total, dtype=np.intp)
    return result
