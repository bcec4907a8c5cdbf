"""The streams of a session, column by column: lengths, page tables, and what touched each stream last."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from planner_service.core.layout import Int32Array, Int64Array
from planner_service.core.lead import Growth, Lead
from planner_service.core.page_tables import IntArray, PageTables
from planner_service.core.pages import PagePool


class Touch(IntEnum):
    """What last changed a stream, other than a cached layout's own steps; layouts themselves count from 1 up."""

    NOTHING = 0
    CHANGED = -1  # dropped or truncated
    DISCARDED = -2
    FORKED = -3


@dataclass(frozen=True, slots=True)
class TakenTable:
    """What a fork took from its target: kept until the fork's step is committed, put back if it is discarded."""

    pages: Int32Array
    planned: int
    committed: int
    exists: bool
    identity: int
    length_identity: int
    last_step: int
    touched: int
    forked_by: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages given to streams: int32 pages in the order of `streams`, `counts` for each."""

    streams: IntArray
    counts: Int32Array
    pages: Int32Array


class StreamTable:
    """Columns indexed by stream number; index -1 of each is the sink, which padding rows read and nothing changes.

    A run of cached steps adds the same to the same streams again and again: that is counted in a `Lead`, and written to
    the columns as soon as anybody looks at them.

    Args:
        max_streams: streams are numbered 0 to `max_streams - 1`.
        pool: where their pages come from.

    Attributes:
        exists: whether the stream has been used and not dropped, bool.
        touched: a `Touch`, or the layout that planned the stream last, int64; `touch` changes it.
        num_touches: how often `touched` was changed.
        identities: rises when a stream's table becomes another one (drop, fork), int64.
        length_identities: rises when steps in flight stop counting for its length (drop, fork, truncate), int64.
        forked_by: the step whose fork made the table, or 0; no step before names its pages as this stream's, int64.
    """

    def __init__(self, max_streams: int, pool: PagePool) -> None:
        size = max_streams + 1
        self.max_streams = max_streams
        self.pool = pool
        self.exists = np.zeros(size, dtype=np.bool_)
        self.identities: Int64Array = np.zeros(size, dtype=np.int64)
        self.length_identities: Int64Array = np.zeros(size, dtype=np.int64)
        self.forked_by: Int64Array = np.zeros(size, dtype=np.int64)
        self.num_touches = 0
        self._touched: Int64Array = np.zeros(size, dtype=np.int64)
        self.touched = self._touched.view()
        self.touched.flags.writeable = False
        self._tables = PageTables(max_streams)
        self._planned: Int32Array = np.zeros(size, dtype=np.int32)
        self._committed: Int32Array = np.zeros(size, dtype=np.int32)
        self._last_step: Int64Array = np.zeros(size, dtype=np.int64)
        self._lead: Lead | None = None
        self._growths: list[Growth] = []  # with pages that are not written down
        self._is_settled = True
        self._last_identity = 0

    @property
    def tables(self) -> PageTables:
        """The page tables."""
        if not self._is_settled:
            self._settle()
        return self._tables

    @property
    def planned(self) -> Int32Array:
        """Length in tokens once every planned step has been committed, int32 [max_streams + 1]."""
        if not self._is_settled:
            self._settle()
        return self._planned

    @property
    def committed(self) -> Int32Array:
        """Length in tokens that has been committed, int32 [max_streams + 1]."""
        if not self._is_settled:
            self._settle()
        return self._committed

    @property
    def last_step(self) -> Int64Array:
        """The last step that names each stream, int64 [max_streams + 1]."""
        if not self._is_settled:
            self._settle()
        return self._last_step

    def touch(self, streams: IntArray | int, touch: int) -> None:
        """Writes down what changed streams."""
        self.num_touches += 1
        self._touched[streams] = touch

    def plan_cached(self, streams: IntArray, length_identities: Int64Array, step_id: int) -> None:
        """Adds a token to each stream's planned length.

        Args:
            streams: a cached layout's streams, all different, intp [n].
            length_identities: theirs, the same array at each step of the layout, int64 [n].
            step_id: the step.
        """
        lead = self._lead
        if lead is None or lead.length_identities is not length_identities:
            self._settle()
            lead = self._lead = Lead(streams, length_identities)
            self._is_settled = False
        lead.num_planned += 1
        lead.last_step = step_id

    def try_commit_cached(self, length_identities: Int64Array) -> bool:
        """Adds a token to each stream's committed length if they are those of the cached layout planned last."""
        lead = self._lead
        if lead is None or lead.length_identities is not length_identities:
            return False
        lead.num_committed += 1
        return True

    def try_grow(self, growth: Growth) -> Int32Array | None:
        """Gives each stream a page, int32 [n]; returns None if it is not known where that goes.

        Raises:
            OutOfPagesError: the pool has too few; nothing has changed.
        """
        tables = self._tables
        if not growth.num_left or growth.num_moves != tables.num_moves:
            return None
        pages = self.pool.take(len(growth.streams))
        tables.arena[growth.places] = pages
        if not growth.num_unwritten:
            self._growths.append(growth)
            self._is_settled = False
        growth.add(1)
        return pages

    def ungrow(self, growth: Growth, pages: Int32Array) -> None:
        """Undoes the last `try_grow` that gave pages, right after it."""
        self.pool.untake(pages)
        growth.add(-1)
        if not growth.num_unwritten:
            self._growths.pop()

    def find_places(self, growth: Growth, num_pages: Int32Array) -> None:
        """Finds where the next pages go, if none of the streams holds more than these, int32 [n]."""
        tables = self.tables
        num_held = tables.num_held[growth.streams]
        growth.places = tables.starts[growth.streams] + num_held
        growth.num_moves = tables.num_moves
        room = tables.capacities[growth.streams] - num_held
        growth.num_left = 0 if np.count_nonzero(num_held != num_pages) else int(np.minimum.reduce(room))

    def existing(self) -> IntArray:
        """Returns the numbers of the streams that exist, intp, rising."""
        return np.flatnonzero(self.exists)

    def reserve(self, streams: IntArray, num_needed: Int32Array) -> Reservation | None:
        """Gives each stream the pages it lacks, in the order of `streams`.

        Args:
            streams: all different, intp [n].
            num_needed: how many pages each is to hold at least, int32 [n].

        Returns:
            What was given, or None if nothing was lacking.

        Raises:
            OutOfPagesError: the pool has too few; nothing has changed.
        """
        counts = num_needed - self.tables.num_held[streams]
        is_short = counts > 0
        num_short = np.count_nonzero(is_short)  # a tenth of what any() and all() take on a few elements
        if num_short < len(counts):
            if not num_short:
                return None
            counts = counts[is_short]
            streams = streams[is_short]
        pages = self.pool.take(int(counts.sum()))
        self.tables.append(streams, counts, pages)
        return Reservation(streams, counts, pages)

    def unreserve(self, reservation: Reservation) -> None:
        """Undoes the last `reserve` that took pages."""
        self.tables.num_held[reservation.streams] -= reservation.counts
        self.pool.untake(reservation.pages)

    def cut(self, stream: int, length: int, num_pages: int) -> Int32Array:
        """Cuts a stream back to `length` tokens on `num_pages` pages; returns the pages cut off, still held."""
        pages = self.tables.cut(stream, num_pages)
        self.planned[stream] = length
        self.committed[stream] = length
        self.length_identities[stream] = self._next_identity()
        self.touch(stream, Touch.CHANGED)
        return pages

    def remove(self, stream: int) -> Int32Array:
        """Ends a stream and returns its pages, still held."""
        pages = self.tables.remove(stream)
        self.planned[stream] = 0
        self.committed[stream] = 0
        self.exists[stream] = False
        self.forked_by[stream] = 0
        self.identities[stream] = self.length_identities[stream] = self._next_identity()
        self.touch(stream, Touch.CHANGED)
        return pages

    def replace(self, stream: int, pages: Int32Array, length: int, step_id: int) -> TakenTable:
        """Makes these pages, holding `length` tokens, the stream's table for a step's fork; returns what it had."""
        taken = TakenTable(
            pages=self.tables.pages_of(stream),
            planned=int(self.planned[stream]),
            committed=int(self.committed[stream]),
            exists=bool(self.exists[stream]),
            identity=int(self.identities[stream]),
            length_identity=int(self.length_identities[stream]),
            last_step=int(self.last_step[stream]),
            touched=int(self.touched[stream]),
            forked_by=int(self.forked_by[stream]),
        )
        self.tables.replace(stream, pages)
        self.planned[stream] = length
        self.committed[stream] = 0  # until the fork's step is committed
        self.exists[stream] = True
        self.forked_by[stream] = step_id
        self.identities[stream] = self.length_identities[stream] = self._next_identity()
        self.touch(stream, Touch.FORKED)
        return taken

    def put_back(self, stream: int, taken: TakenTable) -> Int32Array:
        """Undoes `replace`; returns the pages the stream had since, still held."""
        pages = self.tables.pages_of(stream)
        self.tables.replace(stream, taken.pages)
        self.planned[stream] = taken.planned
        self.committed[stream] = taken.committed
        self.exists[stream] = taken.exists
        self.forked_by[stream] = taken.forked_by
        self.identities[stream] = taken.identity
        self.length_identities[stream] = taken.length_identity
        self.last_step[stream] = taken.last_step
        self.touch(stream, taken.touched)
        return pages

    def _settle(self) -> None:
        """Writes to the columns what cached steps have added."""
        self._is_settled = True
        if self._lead is not None:
            lead, self._lead = self._lead, None
            self._planned[lead.streams] += np.int32(lead.num_planned)
            self._committed[lead.streams] += np.int32(lead.num_committed)
            self._last_step[lead.streams] = lead.last_step
        for growth in self._growths:
            self._tables.num_held[growth.streams] += np.int32(growth.num_unwritten)
            growth.num_unwritten = 0
        self._growths.clear()

    def _next_identity(self) -> int:
        self._last_identity += 1
        return self._last_identity

    def count_holders(self) -> Int32Array:
        """Returns how many tables hold each page, int32 [num_pages]."""
        holders = np.zeros(self.pool.num_pages, dtype=np.int32)
        for stream in range(self.max_streams):
            if self.tables.num_held[stream]:
                np.add.at(holders, self.tables.pages_of(stream), 1)
        return holders
