"""The decode plan cache: keeps the last few decode layouts' plans and advances them by one token, in place."""

from collections import OrderedDict
from itertools import pairwise

import numpy as np

from planner_service.core.arrays import ARRAY_NAMES, ITEM_BYTES, ArraysExtent, align
from planner_service.core.builder import PlanSizes, gather_indices, views_of
from planner_service.core.cache_misses import CacheTally, compare_layouts
from planner_service.core.crossings import Crossing, DecodeItems, build_crossing, group_by_phase, splice
from planner_service.core.layout import Int32Array, Int64Array, PlanLabelRows, StepLayout
from planner_service.core.page_tables import IntArray, PageTables
from planner_service.core.plan import MissReason
from planner_service.core.ring import BufferSet
from planner_service.core.rows import LayoutRows
from planner_service.core.streams import StreamTable, Touch

DEFAULT_NUM_ENTRIES = 8
# Splicing takes a sixth of a microsecond a crossing, gathering every page again a few nanoseconds a page.
_FEW_CROSSINGS = 64
_PAGES_A_SPLICE = 64
_MAX_CROSSINGS_BYTES = 1 << 20  # of an entry; beyond, what a crossing changes is worked out each time
_KV_INDPTR, _KV_INDICES, _LAST, _KV_LENS, _SLOTS, _POSITIONS = (ARRAY_NAMES.index(name) for name in ARRAY_NAMES[1:])


class CacheEntry:
    """The last plan of one decode layout.

    The arrays whose size is fixed by the rows are one run (`_fixed`), to which a step adds the same each time but for
    the slots of rows that cross a page. Page indices are kept apart, plan label by plan label, and change only where a
    row crosses a page.

    Args:
        rows: the layout.
        sizes: of its last plan.
        items: the buffer set that plan was written to, int32.
        page_size: tokens a page holds.
        length_identities: the streams' length identities, int64 [num_stream_rows].
        touch: what `StreamTable.touched` holds for its streams while nothing else touches them.

    Attributes:
        num_touches: `StreamTable.num_touches` when nothing else had touched its streams, or -1.
        tally: hits and misses of this layout, for as long as it stays in the cache.
        extents: where the arrays stand, for the state the entry is in.
        num_bytes: bytes of the whole run, for the state the entry is in.
        num_steps: how often it was advanced since its last full plan.
    """

    def __init__(
        self,
        rows: LayoutRows,
        sizes: PlanSizes,
        items: Int32Array,
        *,
        page_size: int,
        length_identities: Int64Array,
        touch: int,
    ) -> None:
        self.rows = rows
        self.length_identities = length_identities
        self.touch = touch
        self.num_touches = -1
        self.tally = CacheTally()
        self.extents = sizes.extents
        self.num_bytes = sizes.num_bytes
        self.num_steps = 0
        self._page_size = page_size
        self._slots_a_page = np.int32(page_size)
        self._fixed = items[: self.extents[0].offsets[_KV_INDICES] // ITEM_BYTES].copy()
        self._fixed_memory = self._fixed.data
        self._indices = [views_of(extent, items)[_KV_INDICES].copy().data for extent in self.extents]
        self._first_num_pages = sizes.num_pages
        self._first_kv_lens = sizes.kv_lens
        self._content = object()  # another one whenever the indices change
        self._page_ranks = None if rows.page_order is None else np.argsort(rows.page_order)
        # What only later steps need is made at the first of them.
        self._items: DecodeItems | None = None
        self._phases: dict[int, IntArray] = {}
        self._crossings: dict[int, Crossing] = {}

    def next_crossing(self) -> Crossing | None:
        """Returns the rows that need one more page at the next step, or None."""
        if self._items is None:
            self._items = self._find_items()
            is_padded = self.rows.stream_rows is not None
            kv_lens = self._first_kv_lens[self.rows.stream_rows] if is_padded else self._first_kv_lens
            self._phases = group_by_phase(kv_lens, self._page_size)
        phase = (self.num_steps + 1) % self._page_size
        crossing = self._crossings.get(phase)
        if crossing is None and phase in self._phases:
            crossing = build_crossing(self.rows, self._items, self._phases[phase], self._page_ranks, self._page_size)
            if len(self._phases) * self._fixed.nbytes <= _MAX_CROSSINGS_BYTES:
                self._crossings[phase] = crossing
        return crossing

    def count_pages(self, crossing: Crossing) -> Int32Array:
        """Returns the pages that the crossing rows need, in the order in which they are given, int32."""
        num_more = np.int32(self.num_steps // self._page_size + 1)
        needed: Int32Array = self._first_num_pages[crossing.ordered_rows] + num_more
        return needed

    def measure_next(self, crossing: Crossing | None) -> int:
        """Returns the bytes of the next step's plan."""
        if crossing is None:
            return self.num_bytes
        end = self.extents[0].offsets[_KV_INDICES]
        for i, (first_row, end_row) in enumerate(pairwise(crossing.bounds)):
            end += align((len(self._indices[i]) + end_row - first_row) * ITEM_BYTES)
        return end

    def advance(self, streams: StreamTable, crossing: Crossing | None, pages: Int32Array | None = None) -> None:
        """Moves the entry on by one step.

        Args:
            streams: the session's streams; those of the crossing rows hold their new page already.
            crossing: from `next_crossing`.
            pages: these new pages, in the order in which they were given, int32; None to read them from the tables.
        """
        assert self._items is not None
        if crossing is None:
            self._fixed += self._items.increments
        else:
            if pages is None:
                pages = streams.tables.read(crossing.growth.streams, self.count_pages(crossing) - 1)
            self._cross(streams, crossing, pages)
        self.tally.num_hits += 1
        self.num_steps += 1

    def write(self, buffer_set: BufferSet) -> None:
        """Writes the plan; indices only if the set does not hold them from an earlier step."""
        memory = buffer_set.memory
        memory[: len(self._fixed_memory)] = self._fixed_memory
        if buffer_set.content is not self._content:
            for i, indices in enumerate(self._indices):
                first = self.extents[i].offsets[_KV_INDICES] // ITEM_BYTES
                memory[first : first + len(indices)] = indices
            buffer_set.content = self._content

    def corrupt(self) -> None:
        """Makes the plan wrong for good, for a drill: the first row's kv length is one too long."""
        views_of(self.extents[0], self._fixed)[_KV_LENS][0] += 1

    def _find_items(self) -> DecodeItems:
        """Finds the items that a step changes."""
        rows = self.rows
        ends_of_spans = np.cumsum(rows.spans) - 1
        places = []
        kv_indptrs = []
        token = 0
        for i, extent in enumerate(self.extents):
            first, end = rows.bounds[i], rows.bounds[i + 1]
            row = np.arange(end - first)
            last_token = ends_of_spans[first:end] - token
            token += extent.num_tokens
            offsets = [offset // ITEM_BYTES for offset in extent.offsets]
            of_label = (
                offsets[_LAST] + row,
                offsets[_SLOTS] + last_token,
                offsets[_KV_LENS] + row,
                offsets[_POSITIONS] + last_token,
            )
            places.append(np.stack(of_label))
            kv_indptrs.append((offsets[_KV_INDPTR] + 1, offsets[_KV_INDPTR] + 1 + end - first))
        all_places = np.concatenate(places, axis=1)
        if rows.stream_rows is not None:
            all_places = all_places[:, rows.stream_rows]
        increments = np.zeros_like(self._fixed)
        increments[all_places] = 1
        return DecodeItems(
            lasts=all_places[0], slots=all_places[1], increments=increments, kv_indptrs=tuple(kv_indptrs)
        )

    def _cross(self, streams: StreamTable, crossing: Crossing, pages: Int32Array) -> None:
        if crossing.places is not None:
            pages = pages[crossing.places]
        ends = self._fixed[crossing.end_items].tolist()
        self._fixed += crossing.increments
        self._fixed[crossing.slot_items] = pages * self._slots_a_page
        page_memory = pages.data
        for i, (first, end) in enumerate(pairwise(crossing.bounds)):
            if end - first > _FEW_CROSSINGS + len(self._indices[i]) // _PAGES_A_SPLICE:
                self._indices[i] = self._gather(streams.tables, i)
            elif first < end:
                self._indices[i] = splice(self._indices[i], ends[first:end], page_memory[first:end])
        self._content = object()
        self._place_indices()

    def _gather(self, tables: PageTables, label: int) -> "memoryview[int]":
        """Returns a plan label's indices, read from the page tables again."""
        rows = slice(self.rows.bounds[label], self.rows.bounds[label + 1])
        num_pages = np.diff(views_of(self.extents[label], self._fixed)[_KV_INDPTR])
        return gather_indices(tables.starts[self.rows.streams[rows]], num_pages, tables.arena).data

    def _place_indices(self) -> None:
        """Places each plan label's indices behind those of the one before."""
        extents = []
        start = self.extents[0].offsets[_KV_INDICES]
        for i, indices in enumerate(self._indices):
            name, num_rows, num_tokens, _, offsets = self.extents[i]
            if offsets[_KV_INDICES] != start:
                offsets = (*offsets[:_KV_INDICES], start, *offsets[_KV_INDICES + 1 :])
            extents.append(ArraysExtent(name, num_rows, num_tokens, len(indices), offsets))
            start += align(len(indices) * ITEM_BYTES)
        self.extents = tuple(extents)
        self.num_bytes = start


class PlanCache:
    """The entries, the last used last.

    Args:
        num_entries: how many layouts are kept; the least recently used goes first.

    Attributes:
        tally: hits and misses of all layouts.
    """

    def __init__(self, num_entries: int = DEFAULT_NUM_ENTRIES) -> None:
        self.tally = CacheTally()
        self._num_entries = num_entries
        self._entries: OrderedDict[tuple[tuple[PlanLabelRows, ...], bytes], CacheEntry] = OrderedDict()
        self._last_hit: tuple[LayoutRows, CacheEntry] | None = None  # of the last `find`, if it was one

    @property
    def entries(self) -> tuple[CacheEntry, ...]:
        """The entries, the last used first."""
        return tuple(reversed(self._entries.values()))

    def find_rows(self, layout: StepLayout) -> LayoutRows | None:
        """Returns the rows of a layout that is kept, whether its next plan follows from the last one or not."""
        entry = self._entries.get(_key_of(layout))
        return entry.rows if entry is not None and is_plain(layout) else None

    def find(self, rows: LayoutRows, streams: StreamTable) -> CacheEntry | MissReason:
        """Returns the entry that the layout's next plan follows from, or why there is none."""
        last_hit, self._last_hit = self._last_hit, None
        if last_hit is not None and last_hit[0] is rows and last_hit[1].num_touches == streams.num_touches:
            self._last_hit = last_hit
            return last_hit[1]
        layout = rows.layout
        if not rows.is_decode:
            return MissReason.NOT_DECODE
        if layout.forks_before or layout.forks_after:
            return MissReason.FORK
        if not layout.commit:
            return MissReason.NOT_COMMITTING
        key = _key_of(rows.layout)
        entry = self._entries.get(key)
        if entry is None:
            last = next(reversed(self._entries.values()), None)
            return MissReason.COLD if last is None else compare_layouts(rows, last.rows)
        self._entries.move_to_end(key)
        touched = streams.touched[rows.row_streams]
        is_other = touched != entry.touch
        if np.count_nonzero(is_other):  # a tenth of what any() takes on a few rows
            return _REASONS.get(int(touched[is_other][0]), MissReason.STREAM_CHANGED)
        entry.num_touches = streams.num_touches
        self._last_hit = (rows, entry)
        return entry

    def store(self, entry: CacheEntry) -> None:
        """Keeps an entry, in the place of an older one for the same layout."""
        self._last_hit = None
        key = _key_of(entry.rows.layout)
        if key in self._entries:
            entry.tally = self._entries[key].tally
        self._entries[key] = entry
        self._entries.move_to_end(key)
        if len(self._entries) > self._num_entries:
            self._entries.popitem(last=False)

    def count_miss(self, rows: LayoutRows, reason: MissReason) -> None:
        """Counts a plan that was made from scratch, in all and for its layout if that is kept."""
        self.tally.count_miss(reason)
        entry = self._entries.get(_key_of(rows.layout))
        if entry is not None:
            entry.tally.count_miss(reason)

    def remove(self, entry: CacheEntry) -> None:
        """Forgets an entry."""
        self._last_hit = None
        self._entries.pop(_key_of(entry.rows.layout), None)


_REASONS = {int(Touch.DISCARDED): MissReason.DISCARDED, int(Touch.FORKED): MissReason.FORK}


def is_plain(layout: StepLayout) -> bool:
    """Whether a layout does nothing but add its tokens."""
    return layout.commit and not layout.forks_before and not layout.forks_after


def _key_of(layout: StepLayout) -> tuple[tuple[PlanLabelRows, ...], bytes]:
    return layout.plan_labels, layout.page_order
