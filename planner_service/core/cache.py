"""The decode plan cache: keeps the last few decode layouts' plans and advances them by one token, in place."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner_service.core.arrays import ALIGNMENT_BYTES, ARRAY_NAMES, ITEM_BYTES, ArraysExtent
from planner_service.core.builder import PlanSizes, gather_indices, views_of
from planner_service.core.cache_misses import CacheTally, compare_layouts
from planner_service.core.crossings import Crossing, DecodeItems, build_crossing, group_by_phase
from planner_service.core.layout import Int32Array, PlanLabelRows
from planner_service.core.page_tables import IntArray, PageTables
from planner_service.core.plan import MissReason
from planner_service.core.ring import BufferSet
from planner_service.core.rows import LayoutRows
from planner_service.core.streams import Int64Array, StreamTable, Touch

DEFAULT_NUM_ENTRIES = 8
# Splicing takes a third of a microsecond a crossing, gathering every page again a few nanoseconds a page.
_FEW_CROSSINGS = 32
_PAGES_A_SPLICE = 256
_MAX_CROSSINGS_BYTES = 1 << 20  # of an entry; beyond, what a crossing changes is worked out each time
_ONE = np.int32(1)
_KV_INDPTR, _KV_INDICES, _LAST, _KV_LENS, _SLOTS, _POSITIONS = (ARRAY_NAMES.index(name) for name in ARRAY_NAMES[1:])


class CacheEntry:
    """The last plan of one decode layout.

    The arrays whose size is fixed by the rows are one run (`_fixed`), to which a step adds the same each time but for
    the slots of rows that cross a page. Page indices are kept apart, all plan labels one after another, and change only
    where a row crosses a page.

    Args:
        rows: the layout.
        sizes: of its last plan; `num_pages` becomes the entry's own.
        items: the buffer set that plan was written to, int32.
        page_size: tokens a page holds.
        length_identities: the streams' length identities, int64 [num_stream_rows].
        touch: what `StreamTable.touched` holds for its streams while nothing else touches them.

    Attributes:
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
        self.tally = CacheTally()
        self.extents = sizes.extents
        self.num_bytes = sizes.num_bytes
        self.num_steps = 0
        self._page_size = page_size
        self._bounds = list(sizes.index_bounds)
        self._fixed = items[: self.extents[0].offsets[_KV_INDICES] // ITEM_BYTES].copy()
        self._indices = np.concatenate([views_of(extent, items)[_KV_INDICES] for extent in self.extents])
        self._num_pages = sizes.num_pages
        self._first_kv_lens = sizes.kv_lens
        self._content = object()  # another one whenever the indices change
        self._ends: IntArray = np.cumsum(sizes.num_pages, dtype=np.intp)
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
        needed: Int32Array = self._num_pages[crossing.ordered_rows] + _ONE
        return needed

    def measure_next(self, crossing: Crossing | None) -> int:
        """Returns an upper bound for the bytes of the next step's plan."""
        if crossing is None:
            return self.num_bytes
        return self.num_bytes + len(crossing.rows) * ITEM_BYTES + len(self.extents) * ALIGNMENT_BYTES

    def advance(self, tables: PageTables, crossing: Crossing | None) -> None:
        """Moves the entry on by one step; the crossing rows' streams hold their new page already."""
        assert self._items is not None
        self.tally.num_hits += 1
        self.num_steps += 1
        if crossing is None:
            self._fixed += self._items.increments
        else:
            self._cross(tables, crossing)

    def write(self, buffer_set: BufferSet) -> None:
        """Writes the plan; indices only if the set does not hold them from an earlier step."""
        items = buffer_set.items
        items[: len(self._fixed)] = self._fixed
        if buffer_set.content is not self._content:
            for extent, start, end in zip(self.extents, self._bounds, self._bounds[1:], strict=False):
                first = extent.offsets[_KV_INDICES] // ITEM_BYTES
                items[first : first + end - start] = self._indices[start:end]
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

    def _cross(self, tables: PageTables, crossing: Crossing) -> None:
        rows = crossing.rows
        pages = tables.arena[tables.starts[crossing.streams] + self._num_pages[rows]]
        self._fixed += crossing.increments
        self._fixed[crossing.slot_items] = pages * np.int32(self._page_size)
        self._num_pages[rows] += _ONE
        if len(rows) > _FEW_CROSSINGS + len(self._indices) // _PAGES_A_SPLICE:
            self._indices = gather_indices(tables.starts[self.rows.streams], self._num_pages, tables.arena)
        else:
            self._indices = _splice(self._indices, self._ends[rows], pages)
        self._ends += crossing.added
        self._content = object()
        self._shift_bounds(crossing.num_added)

    def _shift_bounds(self, num_added: Sequence[int]) -> None:
        """Makes room for the pages that were added before the end of each plan label."""
        extents = []
        start = self.extents[0].offsets[_KV_INDICES]
        for i, (extent, added) in enumerate(zip(self.extents, num_added, strict=True)):
            self._bounds[i + 1] += added
            num_indices = self._bounds[i + 1] - self._bounds[i]
            offsets = (*extent.offsets[:_KV_INDICES], start, *extent.offsets[_KV_INDICES + 1 :])
            extents.append(ArraysExtent(extent.name, extent.num_rows, extent.num_tokens, num_indices, offsets))
            start += -(-num_indices * ITEM_BYTES // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
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

    @property
    def entries(self) -> tuple[CacheEntry, ...]:
        """The entries, the last used first."""
        return tuple(reversed(self._entries.values()))

    def find(self, rows: LayoutRows, streams: StreamTable) -> CacheEntry | MissReason:
        """Returns the entry that the layout's next plan follows from, or why there is none."""
        layout = rows.layout
        if not rows.is_decode:
            return MissReason.NOT_DECODE
        if layout.forks_before or layout.forks_after:
            return MissReason.FORK
        if not layout.commit:
            return MissReason.NOT_COMMITTING
        key = _key_of(rows)
        entry = self._entries.get(key)
        if entry is None:
            last = next(reversed(self._entries.values()), None)
            return MissReason.COLD if last is None else compare_layouts(rows, last.rows)
        self._entries.move_to_end(key)
        touched = streams.touched[rows.row_streams]
        is_other = touched != entry.touch
        if np.count_nonzero(is_other):  # a tenth of what any() takes on a few rows
            return _REASONS.get(int(touched[is_other][0]), MissReason.STREAM_CHANGED)
        return entry

    def store(self, entry: CacheEntry) -> None:
        """Keeps an entry, in the place of an older one for the same layout."""
        key = _key_of(entry.rows)
        if key in self._entries:
            entry.tally = self._entries[key].tally
        self._entries[key] = entry
        self._entries.move_to_end(key)
        if len(self._entries) > self._num_entries:
            self._entries.popitem(last=False)

    def count_miss(self, rows: LayoutRows, reason: MissReason) -> None:
        """Counts a plan that was made from scratch, in all and for its layout if that is kept."""
        self.tally.count_miss(reason)
        entry = self._entries.get(_key_of(rows))
        if entry is not None:
            entry.tally.count_miss(reason)

    def remove(self, entry: CacheEntry) -> None:
        """Forgets an entry."""
        self._entries.pop(_key_of(entry.rows), None)


_REASONS = {int(Touch.DISCARDED): MissReason.DISCARDED, int(Touch.FORKED): MissReason.FORK}


def is_cacheable(rows: LayoutRows) -> bool:
    """Whether the layout's next step follows from this one."""
    layout = rows.layout
    return rows.is_decode and layout.commit and not layout.forks_before and not layout.forks_after


def _key_of(rows: LayoutRows) -> tuple[tuple[PlanLabelRows, ...], bytes]:
    return rows.layout.plan_labels, rows.layout.page_order


def _splice(indices: Int32Array, places: npt.NDArray[np.intp], pages: Int32Array) -> Int32Array:
    """Returns `indices` with `pages[i]` inserted before what stood at `places[i]` (rising)."""
    result = np.empty(len(indices) + len(pages), dtype=np.int32)
    previous = 0
    for i, place in enumerate(places.tolist()):
        result[previous + i : place + i] = indices[previous:place]
        previous = place
    result[previous + len(pages) :] = indices[previous:]
    result[places + np.arange(len(pages))] = pages
    return result
