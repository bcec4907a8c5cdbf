"""The pool of KV pages: a first-in first-out queue of free pages, and reference counts."""

import numpy as np
import numpy.typing as npt

from planner_service.core.layout import Int32Array
from planner_service.errors import OutOfPagesError

SINK_PAGE = 0
_PAGES_WRITTEN_AHEAD = 1_024


class PagePool:
    """Hands out pages from 1 up, first in first out; a page goes to the back when its last holder gives it back.

    Args:
        num_pages: pages in the pool, the sink page included; the sink page is never handed out.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages - 1
        self.has_ever_shared = False
        # A ring buffer. Pages that nobody has had yet are written into it when they are first taken: a pool of 2^31
        # pages would otherwise take seconds to make, and 8 GB.
        self._queue: Int32Array = np.empty(num_pages - 1, dtype=np.int32)
        self._num_written = 0
        self._head = 0
        # Beyond its first: most pages never have another one, so that handing them out counts nothing.
        self._num_more_holders: Int32Array = np.zeros(num_pages, dtype=np.int32)

    @property
    def num_shared(self) -> int:
        """Pages that more than one page table holds."""
        return int(np.count_nonzero(self._num_more_holders)) if self.has_ever_shared else 0

    def take(self, num_pages: int) -> Int32Array:
        """Takes pages from the front of the queue.

        Args:
            num_pages: how many.

        Returns:
            The pages, int32 [num_pages], each with one holder.

        Raises:
            OutOfPagesError: fewer are free; nothing was taken.
        """
        if num_pages > self.num_free:
            raise OutOfPagesError(num_pages - self.num_free, self.num_free)
        end = self._head + num_pages
        capacity = len(self._queue)
        if end > self._num_written:
            self._write_queue(min(end + _PAGES_WRITTEN_AHEAD, capacity))
        if end <= capacity:
            pages = self._queue[self._head : end].copy()
        else:
            pages = np.concatenate((self._queue[self._head :], self._queue[: end - capacity]))
        self._head = end % capacity
        self.num_free -= num_pages
        return pages

    def untake(self, pages: Int32Array) -> None:
        """Undoes the last `take` that is not undone yet: its pages stand at the front of the queue again.

        Only right while nothing has been given back since, which a planner refusing a layout sees to.
        """
        self._head = (self._head - len(pages)) % len(self._queue)
        self.num_free += len(pages)

    def share(self, pages: Int32Array) -> None:
        """Adds a holder to each of these pages (all different)."""
        if len(pages):
            self._num_more_holders[pages] += 1
            self.has_ever_shared = True

    def unshare(self, pages: Int32Array) -> None:
        """Undoes `share`: takes a holder off pages that all have another one."""
        self._num_more_holders[pages] -= 1

    def give_back(self, pages: Int32Array) -> None:
        """Takes a holder off each of these pages (all different); those without one go to the back, in this order."""
        freed = self._take_holder_off(pages) if self.has_ever_shared else pages
        capacity = len(self._queue)
        start = (self._head + self.num_free) % capacity
        first = min(len(freed), capacity - start)
        self._queue[start : start + first] = freed[:first]
        self._queue[: len(freed) - first] = freed[first:]
        self.num_free += len(freed)

    def has_other_holders(self, pages: Int32Array) -> npt.NDArray[np.bool_]:
        """Returns for each page whether more than one page table holds it, bool [len(pages)]."""
        return self._num_more_holders[pages] > 0

    def _take_holder_off(self, pages: Int32Array) -> Int32Array:
        """Returns the pages that had no other holder, int32."""
        num_more = self._num_more_holders[pages]
        self._num_more_holders[pages] = np.maximum(num_more - 1, 0)
        freed: Int32Array = pages[num_more == 0]
        return freed

    def _write_queue(self, end: int) -> None:
        """Writes the pages that nobody has had yet into the queue, up to this place."""
        self._queue[self._num_written : end] = np.arange(self._num_written + 1, end + 1, dtype=np.int32)
        self._num_written = max(end, self._num_written)

    def check_integrity(self, num_holders: Int32Array) -> None:
        """Asserts that free and held pages add up.

        Args:
            num_holders: what the holders themselves count, int32 [num_pages].
        """
        self._write_queue(len(self._queue))
        order = (self._head + np.arange(self.num_free)) % len(self._queue)
        free = self._queue[order]
        assert len(np.unique(free)) == self.num_free, "a page is free twice"
        assert not np.any(free == SINK_PAGE), "the sink page is free"
        assert not np.any(num_holders[free]), "a free page has a holder"
        num_more = np.maximum(num_holders - 1, 0)
        assert np.array_equal(self._num_more_holders, num_more), "page tables and reference counts differ"
        assert self.num_free + np.count_nonzero(num_holders) == self.num_pages - 1, "a page is lost"
