"""One attempt to plan a step: what it changes in tables can be taken back until the plan stands."""

from collections.abc import Callable

import numpy as np

from planner_service.core.layout import Fork, Int32Array
from planner_service.core.page_tables import IntArray
from planner_service.core.plan import PageCopies
from planner_service.core.rows import LayoutRows
from planner_service.core.steps import ForkRecord, PageReplacement, StepInFlight
from planner_service.core.streams import StreamTable


class PlanAttempt:
    """Changes made for one step, in order, each with its undoing.

    Args:
        streams: the session's streams.
        step: the step that is to go in flight.
        page_size: tokens a page holds.

    Attributes:
        copies_before: pages to copy before the step.
        copies_after: pages to copy after it.
    """

    def __init__(self, streams: StreamTable, step: StepInFlight, page_size: int) -> None:
        self.copies_before: PageCopies = []
        self.copies_after: PageCopies = []
        self._streams = streams
        self._pool = streams.pool
        self._step = step
        self._page_size = page_size
        self._undo: list[Callable[[], None]] = []

    def roll_back(self) -> None:
        """Takes everything back: tables, lengths and the order of free pages are as they were."""
        for action in reversed(self._undo):
            action()

    def fork(self, fork: Fork, *, is_after: bool) -> None:
        """Makes the fork's target equal to its source: full pages are shared, a partly filled one is copied.

        Raises:
            OutOfPagesError: there is no page for the copy.
        """
        streams, pool = self._streams, self._pool
        length = int(streams.planned[fork.source])
        num_full, num_rest = divmod(length, self._page_size)
        source_pages = streams.tables.pages_of(fork.source)
        shared = source_pages[:num_full]
        own = pool.take(1 if num_rest else 0)
        pool.share(shared)
        taken = streams.replace(fork.target, np.concatenate((shared, own)), length, self._step.step_id)
        identity = int(streams.length_identities[fork.target])
        self._step.forks.append(ForkRecord(fork.target, length, identity, is_after, taken))
        copies = self.copies_after if is_after else self.copies_before
        copies += [(int(source_pages[num_full]), int(page)) for page in own]

        def put_back() -> None:
            streams.put_back(fork.target, taken)
            pool.unshare(shared)
            pool.untake(own)

        self._undo.append(put_back)

    def replace_shared_pages(self) -> None:
        """Gives rows that would write into a page shared with another stream (after fork and truncate) a copy of it.

        Raises:
            OutOfPagesError: there is no page for a copy.
        """
        if not self._pool.has_ever_shared:
            return
        streams, tables, step = self._streams, self._streams.tables, self._step
        writers = step.streams[(step.spans > 0) & (streams.planned[step.streams] % self._page_size > 0)]
        places = streams.planned[writers] // self._page_size
        is_shared = self._pool.has_other_holders(tables.arena[tables.starts[writers] + places])
        for stream, place in zip(writers[is_shared].tolist(), places[is_shared].tolist(), strict=True):
            self._replace_page(stream, place)

    def reserve(self, streams: IntArray, num_needed: Int32Array) -> None:
        """Gives each stream the pages it lacks, in the order of `streams` (see `StreamTable.reserve`).

        Raises:
            OutOfPagesError: the pool has too few.
        """
        reservation = self._streams.reserve(streams, num_needed)
        if reservation is not None:
            self._undo.append(lambda: self._streams.unreserve(reservation))

    def add_planned(self, rows: LayoutRows) -> None:
        """Adds the step's spans to the planned lengths of its streams."""
        planned = self._streams.planned
        planned[rows.row_streams] += rows.row_spans

        def subtract() -> None:
            planned[rows.row_streams] -= rows.row_spans

        self._undo.append(subtract)

    def _replace_page(self, stream: int, place: int) -> None:
        tables, pool = self._streams.tables, self._pool
        old_page = int(tables.arena[tables.starts[stream] + place])
        own = pool.take(1)
        new_page = int(own[0])
        tables.set_page(stream, place, new_page)
        identity = int(self._streams.identities[stream])
        self._step.replacements.append(PageReplacement(stream, identity, place, old_page, new_page))
        self.copies_before.append((old_page, new_page))

        def put_back() -> None:
            tables.set_page(stream, place, old_page)
            pool.untake(own)

        self._undo.append(put_back)


def count_pages(rows: LayoutRows, streams: StreamTable, page_size: int) -> int:
    """Returns how many pages a step takes from the pool; for a refusal's figures, so plain rather than fast."""
    layout = rows.layout
    lengths: dict[int, int] = {}
    num_held: dict[int, int] = {}

    def length_of(stream: int) -> int:
        return lengths.get(stream, int(streams.planned[stream]))

    def count_fork(fork: Fork) -> int:
        lengths[fork.target] = length_of(fork.source)
        num_held[fork.target] = -(-lengths[fork.target] // page_size)
        return int(lengths[fork.target] % page_size > 0)

    total = sum(count_fork(fork) for fork in layout.forks_before)
    for stream, span in zip(rows.row_streams.tolist(), rows.row_spans.tolist(), strict=True):
        length = length_of(stream)
        if span and length % page_size and stream not in num_held:
            page = streams.tables.pages_of(stream)[length // page_size : length // page_size + 1]
            total += int(streams.pool.has_other_holders(page)[0])
        held = num_held.get(stream, int(streams.tables.num_held[stream]))
        total += max(-(-(length + span) // page_size) - held, 0)
        lengths[stream] = length + span * layout.commit
    return total + sum(count_fork(fork) for fork in layout.forks_after)
