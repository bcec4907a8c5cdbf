"""The streams of a session, column by column: lengths, page tables, and what touched each stream last."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from planner_service.core.layout import Int32Array
from planner_service.core.page_tables import IntArray, PageTables
from planner_service.core.pages import PagePool

Int64Array = npt.NDArray[np.int64]


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


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages given to streams: int32 pages in the order of `streams`, `counts` for each."""

    streams: IntArray
    counts: Int32Array
    pages: Int32Array


class StreamTable:
    """Columns indexed by stream number; index -1 of each is the sink, which padding rows read and nothing changes.

    Args:
        max_streams: streams are numbered 0 to `max_streams - 1`.
        pool: where their pages come from.

    Attributes:
        planned: length in tokens once every planned step has been committed, int32 [max_streams + 1].
        committed: length in tokens that has been committed, int32.
        exists: whether the stream has been used and not dropped, bool.
        touched: a `Touch`, or the layout that planned the stream last, int64.
        last_step: the last step that names the stream, int64.
        identities: rises when a stream's table becomes another one (drop, fork), int64.
        length_identities: rises when steps in flight stop counting for its length (drop, fork, truncate), int64.
    """

    def __init__(self, max_streams: int, pool: PagePool) -> None:
        size = max_streams + 1
        self.max_streams = max_streams
        self.pool = pool
        self.tables = PageTables(max_streams)
        self.planned: Int32Array = np.zeros(size, dtype=np.int32)
        self.committed: Int32Array = np.zeros(size, dtype=np.int32)
        self.exists = np.zeros(size, dtype=np.bool_)
        self.touched: Int64Array = np.zeros(size, dtype=np.int64)
        self.last_step: Int64Array = np.zeros(size, dtype=np.int64)
        self.identities: Int64Array = np.zeros(size, dtype=np.int64)
        self.length_identities: Int64Array = np.zeros(size, dtype=np.int64)
        self._last_identity = 0

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
        self.touched[stream] = Touch.CHANGED
        return pages

    def remove(self, stream: int) -> Int32Array:
        """Ends a stream and returns its pages, still held."""
        pages = self.tables.remove(stream)
        self.planned[stream] = 0
        self.committed[stream] = 0
        self.exists[stream] = False
        self.identities[stream] = self.length_identities[stream] = self._next_identity()
        self.touched[stream] = Touch.CHANGED
        return pages

    def replace(self, stream: int, pages: Int32Array, length: int) -> TakenTable:
        """Makes these pages, holding `length` tokens, the stream's table; returns what it had."""
        taken = TakenTable(
            pages=self.tables.pages_of(stream),
            planned=int(self.planned[stream]),
            committed=int(self.committed[stream]),
            exists=bool(self.exists[stream]),
            identity=int(self.identities[stream]),
            length_identity=int(self.length_identities[stream]),
            last_step=int(self.last_step[stream]),
            touched=int(self.touched[stream]),
        )
        self.tables.replace(stream, pages)
        self.planned[stream] = length
        self.committed[stream] = 0  # until the fork's step is committed
        self.exists[stream] = True
        self.identities[stream] = self.length_identities[stream] = self._next_identity()
        self.touched[stream] = Touch.FORKED
        return taken

    def put_back(self, stream: int, taken: TakenTable) -> Int32Array:
        """Undoes `replace`; returns the pages the stream had since, still held."""
        pages = self.tables.pages_of(stream)
        self.tables.replace(stream, taken.pages)
        self.planned[stream] = taken.planned
        self.committed[stream] = taken.committed
        self.exists[stream] = taken.exists
        self.identities[stream] = taken.identity
        self.length_identities[stream] = taken.length_identity
        self.last_step[stream] = taken.last_step
        self.touched[stream] = taken.touched
        return pages

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
