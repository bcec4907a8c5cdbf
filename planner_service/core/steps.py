"""Steps in flight: planned, and neither committed nor discarded."""

import dataclasses
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from planner_service.core.layout import Int32Array, Int64Array
from planner_service.core.page_tables import IntArray
from planner_service.core.streams import StreamTable, TakenTable, Touch


@dataclass(slots=True)
class ForkRecord:
    """A fork that a step in flight made: its target's own table is in `taken`."""

    target: int
    length: int
    identity: int
    is_after: bool
    taken: TakenTable


@dataclass(frozen=True, slots=True)
class PageReplacement:
    """A shared page that a step in flight replaced in a table before writing to it."""

    stream: int
    identity: int
    index: int
    old_page: int
    new_page: int


@dataclass(slots=True)
class StepInFlight:
    """What committing or discarding a step needs to know.

    Args:
        step_id: the step.
        commit: whether its tokens are kept.
        streams: the streams of its rows, intp [n].
        spans: their spans, int32 [n].
        length_identities: the streams' length identities when it was planned, int64 [n].
        forks: the forks it made, in order.
        replacements: the shared pages it replaced.
    """

    step_id: int
    commit: bool
    streams: IntArray
    spans: Int32Array
    length_identities: Int64Array
    forks: list[ForkRecord] = field(default_factory=list)
    replacements: list[PageReplacement] = field(default_factory=list)


class _Hold(NamedTuple):
    """Pages that a table gave up: they go back once no step from `first_step` to `last_step` is in flight."""

    first_step: int
    last_step: int
    pages: Int32Array


class StepsInFlight:
    """The steps in flight in order, and the pages given up while they still name them.

    Args:
        streams: the session's streams.
    """

    def __init__(self, streams: StreamTable) -> None:
        self._streams = streams
        self._steps: deque[StepInFlight] = deque()
        self._held: list[_Hold] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last_step_id(self) -> int:
        """The last step in flight, or 0."""
        return self._steps[-1].step_id if self._steps else 0

    def add(self, step: StepInFlight) -> None:
        """Adds a planned step."""
        self._steps.append(step)

    def retire(self, pages: Int32Array, last_step: int, first_step: int = 0) -> list[Int32Array]:
        """Takes pages that a table gave up.

        Args:
            pages: the pages, still held.
            last_step: the last step that names them; it may have ended.
            first_step: a step before which none names them.

        Returns:
            Pages that can be given back now: these, unless a step in flight may name them.
        """
        if not len(pages):
            return []
        hold = _Hold(first_step, last_step, pages)
        if self._is_over(hold):
            return [pages]
        self._held.append(hold)
        return []

    def commit_through(self, step_id: int) -> list[Int32Array]:
        """Commits a step and all before it; returns pages to give back, in order."""
        ended: list[Int32Array] = []
        while self._steps and self._steps[0].step_id <= step_id:
            step = self._steps.popleft()
            is_plain = step.commit and not step.forks and not step.replacements
            if is_plain and self._streams.try_commit_cached(step.length_identities):
                continue
            self._commit(step)
            ended += [np.array([item.old_page], dtype=np.int32) for item in step.replacements]
            ended += [fork.taken.pages for fork in step.forks if len(fork.taken.pages)]
        return ended + self._end_holds()

    def discard_from(self, step_id: int) -> tuple[int, list[Int32Array]]:
        """Undoes a step and all after it; returns how many, and pages to give back, in order."""
        ended: list[Int32Array] = []
        num_discarded = 0
        while self._steps and self._steps[-1].step_id >= step_id:
            ended += self._undo(self._steps.pop())
            num_discarded += 1
        return num_discarded, ended + self._end_holds()

    def count_by_stream(self) -> Int64Array:
        """Returns how many steps in flight have a row of each stream, int64 [max_streams + 1]."""
        counts: Int64Array = np.zeros(self._streams.max_streams + 1, dtype=np.int64)
        for step in self._steps:
            counts[step.streams] += 1  # A stream stands in one row of a step at most.
        return counts

    def count_holders(self, holders: Int32Array) -> None:
        """Adds the pages held here to `holders`, int32 [num_pages]."""
        for hold in self._held:
            np.add.at(holders, hold.pages, 1)
        for step in self._steps:
            for fork in step.forks:
                np.add.at(holders, fork.taken.pages, 1)
            for item in step.replacements:
                holders[item.old_page] += 1

    def _end_holds(self) -> list[Int32Array]:
        if not self._held:
            return []
        ended = [hold.pages for hold in self._held if self._is_over(hold)]
        if ended:
            self._held = [hold for hold in self._held if not self._is_over(hold)]
        return ended

    def _is_over(self, hold: _Hold) -> bool:
        return not any(hold.first_step <= step.step_id <= hold.last_step for step in self._steps)

    def _commit(self, step: StepInFlight) -> None:
        for fork in step.forks:
            if not fork.is_after:
                self._commit_length(fork.target, fork.identity, fork.length)
        if step.commit:
            self._commit_rows(step)
        for fork in step.forks:
            if fork.is_after:
                self._commit_length(fork.target, fork.identity, fork.length)

    def _commit_rows(self, step: StepInFlight) -> None:
        streams = self._streams
        is_same = streams.length_identities[step.streams] == step.length_identities
        if np.count_nonzero(is_same) == len(is_same):
            streams.committed[step.streams] += step.spans
            return
        streams.committed[step.streams[is_same]] += step.spans[is_same]
        for row in np.flatnonzero(~is_same):
            for fork in self._taken(int(step.streams[row]), int(step.length_identities[row])):
                self._retake(fork, fork.taken.committed + int(step.spans[row]))

    def _commit_length(self, stream: int, identity: int, length: int) -> None:
        if self._streams.length_identities[stream] == identity:
            self._streams.committed[stream] = length
        for fork in self._taken(stream, identity):
            self._retake(fork, length)

    def _taken(self, stream: int, length_identity: int) -> Iterator[ForkRecord]:
        """Yields the fork in flight, if any, that took the table this identity names."""
        for step in self._steps:
            for fork in step.forks:
                if fork.target == stream and fork.taken.length_identity == length_identity:
                    yield fork

    @staticmethod
    def _retake(fork: ForkRecord, committed: int) -> None:
        fork.taken = dataclasses.replace(fork.taken, committed=committed)

    def _undo(self, step: StepInFlight) -> list[Int32Array]:
        streams = self._streams
        ended: list[Int32Array] = []
        for fork in reversed(step.forks):
            if fork.is_after:
                ended += self._undo_fork(fork)
        if step.commit:
            is_same = streams.length_identities[step.streams] == step.length_identities
            streams.planned[step.streams[is_same]] -= step.spans[is_same]
        streams.touch(step.streams, Touch.DISCARDED)
        for item in reversed(step.replacements):
            ended += self._undo_replacement(item)
        for fork in reversed(step.forks):
            if not fork.is_after:
                ended += self._undo_fork(fork)
        return ended

    def _undo_fork(self, fork: ForkRecord) -> list[Int32Array]:
        streams = self._streams
        if streams.length_identities[fork.target] != fork.identity:
            # Dropped or truncated since.
            return self.retire(fork.taken.pages, self.last_step_id, fork.taken.forked_by)
        pages = streams.put_back(fork.target, fork.taken)
        # What the step itself reserved for a new stream stays with it, so the stream stays too.
        streams.exists[fork.target] |= len(fork.taken.pages) > 0
        streams.touch(fork.target, Touch.DISCARDED)
        return [pages] if len(pages) else []

    def _undo_replacement(self, item: PageReplacement) -> list[Int32Array]:
        tables = self._streams.tables
        is_there = (
            self._streams.identities[item.stream] == item.identity
            and item.index < tables.num_held[item.stream]
            and tables.arena[tables.starts[item.stream] + item.index] == item.new_page
        )
        if not is_there:
            return self.retire(np.array([item.old_page], dtype=np.int32), self.last_step_id)
        tables.set_page(item.stream, item.index, item.old_page)
        return [np.array([item.new_page], dtype=np.int32)]
