"""Plans steps: forks, reserves, writes, all or nothing, and keeps what committing or discarding them needs."""

from collections.abc import Callable, Iterable

import numpy as np

from planner_service.core.arrays import ITEM_BYTES
from planner_service.core.attempt import PlanAttempt, count_pages
from planner_service.core.builder import PlanSizes, measure_plan, write_plan
from planner_service.core.cache import DEFAULT_NUM_ENTRIES, CacheEntry, PlanCache, is_plain
from planner_service.core.capture import build_capture
from planner_service.core.crossings import Crossing
from planner_service.core.layout import Int32Array, StepLayout, StreamOperation
from planner_service.core.operations import apply_operation
from planner_service.core.pages import SINK_PAGE, PagePool
from planner_service.core.plan import BuiltPlan, CacheMode, PlanSource
from planner_service.core.ring import BufferSet
from planner_service.core.rows import LayoutRows, build_rows, check_repeat
from planner_service.core.steps import StepInFlight, StepsInFlight
from planner_service.core.streams import StreamTable, Touch
from planner_service.core.verify import find_mismatches
from planner_service.errors import DrillRefusedError, LayoutError, OutOfPagesError

FindSet = Callable[[int], BufferSet]  # (num_bytes)


class Planner:
    """The page tables of one session and the plans made from them.

    Args:
        page_size: tokens a page holds.
        num_pages: pages in the pool, the sink page included.
        max_streams: streams are numbered 0 to `max_streams - 1`.
        cache_mode: how decode plans are cached.
        num_cache_entries: how many layouts the cache keeps.

    Attributes:
        cache: the cache, or None if it is off.
        is_drill_pending: whether the cached plan that is used next is made wrong on purpose.
    """

    def __init__(
        self,
        *,
        page_size: int,
        num_pages: int,
        max_streams: int,
        cache_mode: CacheMode = CacheMode.OFF,
        num_cache_entries: int = DEFAULT_NUM_ENTRIES,
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.streams = StreamTable(max_streams, self.pool)
        self.steps = StepsInFlight(self.streams)
        self.cache = PlanCache(num_cache_entries) if cache_mode is not CacheMode.OFF else None
        self.is_drill_pending = False
        self._is_verifying = cache_mode is CacheMode.VERIFY
        self._num_layouts = 0

    def read(self, layout: StepLayout) -> LayoutRows:
        """Returns the rows of a layout, to plan one or more of its steps.

        Raises:
            LayoutError: the layout breaks a rule that does not depend on the session's state.
        """
        known = None if self.cache is None else self.cache.find_rows(layout)
        if known is None:
            return build_rows(layout, self.streams.max_streams)
        check_repeat(layout)
        return known

    def plan(self, rows: LayoutRows, step_id: int, find_set: FindSet) -> BuiltPlan:
        """Plans one step and puts it in flight.

        Args:
            rows: its layout, from `read`.
            step_id: higher than that of every step before.
            find_set: gives the buffer set for a plan of so many bytes.

        Raises:
            LayoutError: the step cannot be planned; nothing has changed.
        """
        if self.cache is None:
            return self._plan_full(rows, step_id, find_set)
        found = self.cache.find(rows, self.streams)
        if not isinstance(found, CacheEntry):
            plan = self._plan_full(rows, step_id, find_set)
            self.cache.count_miss(rows, found)
            return plan._replace(miss_reason=found)
        crossing = found.next_crossing()
        if self._is_verifying:
            plan = self._verify(found, crossing, self._plan_full(rows, step_id, find_set))
        else:
            plan = self._plan_cached(found, crossing, step_id, find_set)
        self.cache.tally.num_hits += 1
        return plan

    def commit_through(self, step_id: int) -> None:
        """Commits a step and all before it."""
        self._give_back(self.steps.commit_through(step_id))

    def discard_from(self, step_id: int) -> int:
        """Undoes a step and all after it; returns how many were in flight."""
        num_discarded, ended = self.steps.discard_from(step_id)
        self._give_back(ended)
        return num_discarded

    def apply(self, operation: StreamOperation) -> None:
        """Applies a change to streams.

        Raises:
            ProtocolError: it names a stream out of range, or a length it cannot be cut to.
        """
        self._give_back(apply_operation(operation, self.streams, self.steps, self.page_size))

    def drill_mismatch(self) -> None:
        """Makes the cached plan that is used next wrong, so that it is found; the full one is served as ever.

        Raises:
            DrillRefusedError: cached plans are not compared, there is none, or a drill is pending already.
        """
        if self.cache is None or not self._is_verifying:
            raise DrillRefusedError("the session's cache mode is not verify: a wrong cached plan would be served")
        if not self.cache.entries:
            raise DrillRefusedError("the session holds no cached plan: let requests decode first")
        if self.is_drill_pending:
            raise DrillRefusedError("a drill is pending: the cached plan that is used next is wrong already")
        self.is_drill_pending = True

    def check_integrity(self) -> None:
        """Asserts that every page is held as often as it is counted, and that lengths fit the pages held.

        Cached plans rely on it that no page which a stream holds beyond its length is shared.
        """
        holders = self.streams.count_holders()
        self.steps.count_holders(holders)
        self.pool.check_integrity(holders)
        streams = self.streams
        capacities = streams.tables.num_held.astype(np.int64) * self.page_size
        assert np.all(streams.planned <= capacities), "a length lacks pages"
        assert np.all(streams.committed <= streams.planned), "a committed length is above the planned one"
        assert not streams.planned[~streams.exists].any(), "a stream that does not exist has a length"
        for stream in streams.existing().tolist():
            spare = streams.tables.pages_of(stream)[-(-int(streams.planned[stream]) // self.page_size) :]
            assert not self.pool.has_other_holders(spare).any(), "a page that is yet to be written is shared"
        sink = streams.tables.pages_of(-1)
        assert not np.any(sink != SINK_PAGE), "the sink's table names another page"

    def _plan_full(self, rows: LayoutRows, step_id: int, find_set: FindSet) -> BuiltPlan:
        streams = self.streams
        step = StepInFlight(step_id, rows.layout.commit, rows.row_streams, rows.row_spans, _NO_IDENTITIES)
        attempt = PlanAttempt(streams, step, self.page_size)
        try:
            for fork in rows.layout.forks_before:
                attempt.fork(fork, is_after=False)
            attempt.replace_shared_pages()
            streams.tables.reserve_sink(-(-rows.max_padding_span // self.page_size))
            sizes = measure_plan(rows, streams.planned, self.page_size)
            attempt.reserve(*rows.order_pages(sizes.num_pages))
            buffer_set = find_set(sizes.num_bytes)
            buffer_set.content = None
            write_plan(rows, sizes, streams.tables, self.page_size, buffer_set.items)
            step.length_identities = streams.length_identities[rows.row_streams]
            if step.commit:
                attempt.add_planned(rows)
            for fork in rows.layout.forks_after:
                attempt.fork(fork, is_after=True)
        except OutOfPagesError as error:
            attempt.roll_back()
            num_free = self.pool.num_free
            raise OutOfPagesError(count_pages(rows, streams, self.page_size) - num_free, num_free) from error
        except LayoutError:
            attempt.roll_back()
            raise
        self._touch(rows, step_id)
        self.steps.add(step)
        if self.cache is not None and rows.is_decode and is_plain(rows.layout):
            self.cache.store(self._build_entry(rows, sizes, buffer_set, step))
        return BuiltPlan(
            buffer_set=buffer_set,
            extents=sizes.extents,
            num_bytes=sizes.num_bytes,
            copies_before=tuple(attempt.copies_before),
            copies_after=tuple(attempt.copies_after),
        )

    def _plan_cached(self, entry: CacheEntry, crossing: Crossing | None, step_id: int, find_set: FindSet) -> BuiltPlan:
        streams = self.streams
        growth = None if crossing is None else crossing.growth
        pages = None if growth is None else streams.try_grow(growth)
        if crossing is not None and pages is None:
            return self._plan_crossing(entry, crossing, step_id, find_set)
        try:
            buffer_set = find_set(entry.measure_next(crossing))
        except LayoutError:
            if growth is not None and pages is not None:
                streams.ungrow(growth, pages)
            raise
        return self._advance(entry, crossing, pages, step_id, buffer_set)

    def _plan_crossing(self, entry: CacheEntry, crossing: Crossing, step_id: int, find_set: FindSet) -> BuiltPlan:
        """Plans a cached step whose rows' next pages are not known to follow on the ones they have."""
        streams, growth = self.streams, crossing.growth
        num_pages = entry.count_pages(crossing)
        reservation = streams.reserve(growth.streams, num_pages)
        try:
            buffer_set = find_set(entry.measure_next(crossing))
        except LayoutError:
            if reservation is not None:
                streams.unreserve(reservation)
            raise
        streams.find_places(growth, num_pages)
        return self._advance(entry, crossing, None, step_id, buffer_set)

    def _advance(
        self,
        entry: CacheEntry,
        crossing: Crossing | None,
        pages: Int32Array | None,
        step_id: int,
        buffer_set: BufferSet,
    ) -> BuiltPlan:
        rows = entry.rows
        entry.advance(self.streams, crossing, pages)
        entry.write(buffer_set)
        self.streams.plan_cached(rows.row_streams, entry.length_identities, step_id)
        self.steps.add(StepInFlight(step_id, True, rows.row_streams, rows.row_spans, entry.length_identities))
        return BuiltPlan(buffer_set, entry.extents, entry.num_bytes, PlanSource.CACHED)

    def _build_entry(self, rows: LayoutRows, sizes: PlanSizes, buffer_set: BufferSet, step: StepInFlight) -> CacheEntry:
        return CacheEntry(
            rows,
            sizes,
            buffer_set.items,
            page_size=self.page_size,
            length_identities=step.length_identities,
            touch=self._num_layouts,
        )

    def _verify(self, entry: CacheEntry, crossing: Crossing | None, full: BuiltPlan) -> BuiltPlan:
        """Advances the entry as a hit would and compares; on a mismatch the full plan's entry stays in its place."""
        assert self.cache is not None
        is_drill, self.is_drill_pending = self.is_drill_pending, False
        if is_drill:
            entry.corrupt()
        entry.advance(self.streams, crossing)
        shadow = BufferSet(0, 0, np.empty(entry.num_bytes // ITEM_BYTES, dtype=np.int32))
        entry.write(shadow)
        cached_arrays = (entry.extents, shadow.items)
        full_arrays = (full.extents, full.buffer_set.items)
        mismatches = find_mismatches(cached_arrays, full_arrays)
        capture = None
        if mismatches:
            self.cache.tally.num_mismatches += 1
            capture = build_capture(
                entry.rows,
                page_size=self.page_size,
                num_pages=self.pool.num_pages,
                num_steps=entry.num_steps,
                mismatches=mismatches,
                cached=cached_arrays,
                full=full_arrays,
                is_drill=is_drill,
            )
        else:
            entry.touch = self._num_layouts
            self.cache.store(entry)
        source = PlanSource.VERIFIED
        return full._replace(source=source, mismatches=mismatches, capture=capture, is_drill=is_drill)

    def _touch(self, rows: LayoutRows, step_id: int) -> None:
        self._num_layouts += 1
        streams = self.streams
        streams.touch(rows.row_streams, self._num_layouts)
        streams.exists[rows.row_streams] = True
        streams.last_step[rows.row_streams] = step_id
        for fork in (*rows.layout.forks_before, *rows.layout.forks_after):
            streams.last_step[[fork.source, fork.target]] = step_id
            streams.touch(fork.target, Touch.FORKED)

    def _give_back(self, ended: Iterable[Int32Array]) -> None:
        for pages in ended:
            self.pool.give_back(pages)


_NO_IDENTITIES = np.empty(0, dtype=np.int64)
