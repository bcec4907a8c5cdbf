"""The decode plan cache: keeps the last few decode layouts' plans and advances them by one token, in place."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner_service.core.arrays import ALIGNMENT_BYTES, ARRAY_NAMES, ITEM_BYTES, ArraysExtent
from planner_service.core.builder import gather_indices, views_of
from planner_service.core.cache_misses import CacheTally, compare_layouts
from planner_service.core.layout import Int32Array, PlanLabelRows
from planner_service.core.page_tables import IntArray
from planner_service.core.plan import MissReason
from planner_service.core.ring import BufferSet
from planner_service.core.rows import LayoutRows
from planner_service.core.streams import Int64Array, StreamTable, Touch

DEFAULT_NUM_ENTRIES = 8
_MAX_SPLICES = 48  # above this many crossings, gathering every page again is cheaper than splicing
_KV_INDPTR, _KV_INDICES, _LAST, _KV_LENS, _SLOTS, _POSITIONS = (ARRAY_NAMES.index(name) for name in ARRAY_NAMES[1:])


class CacheEntry:
    """The last plan of one decode layout.

    The arrays whose size is fixed by the rows are one run (`_fixed`), of which a step without a page crossing adds
    one to `_KV_LENS`, `_LAST`, `_SLOTS` and `_POSITIONS` of each stream row. Page indices are kept apart, all plan
    labels one after another, and change only where a row crosses a page.

    Args:
        rows: the layout.
        extents: where its last plan's arrays stand.
        index_bounds: where each plan label's indices start among all, with the end.
        items: the buffer set that plan was written to, int32.
        num_pages: pages of each row, int32 [num_rows].
        kv_lens: kv length of each row, int32 [num_rows].
        length_identities: the streams' length identities, int64 [num_stream_rows].
        touch: what `StreamTable.touched` holds for its streams while nothing else touches them.

    Attributes:
        tally: hits and misses of this layout, for as long as it stays in the cache.
    """

    def __init__(
        self,
        rows: LayoutRows,
        extents: Sequence[ArraysExtent],
        index_bounds: Sequence[int],
        items: Int32Array,
        num_pages: Int32Array,
        kv_lens: Int32Array,
        length_identities: Int64Array,
        touch: int,
    ) -> None:
        self.rows = rows
        self.length_identities = length_identities
        self.touch = touch
        self.tally = CacheTally()
        self._extents = tuple(extents)
        self._bounds = list(index_bounds)
        self._fixed = items[: extents[0].offsets[_KV_INDICES] // ITEM_BYTES].copy()
        self._indices = np.concatenate([views_of(extent, items)[_KV_INDICES] for extent in extents])
        self._num_pages = num_pages
        self._first_kv_lens = kv_lens
        self._steps_since = 0
        self._content = object()  # another one whenever the indices change
        self._increments: Int32Array | None = None  # made when first needed, as are the next two
        self._places: IntArray = np.empty((0, 0), dtype=np.intp)
        self._crossings: dict[int, IntArray] = {}
        self._kv_indptrs: list[Int32Array] = []
        self._ends: IntArray = np.cumsum(num_pages, dtype=np.intp)
        self._page_ranks = None if rows.page_order is None else np.argsort(rows.page_order)

    @property
    def extents(self) -> tuple[ArraysExtent, ...]:
        """Where the arrays stand, for the state the entry is in."""
        return self._extents

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole run, for the state the entry is in."""
        return self._end_of(self._extents)

    @property
    def num_steps(self) -> int:
        """How often it was advanced since its last full plan."""
        return self._steps_since

    def next_crossings(self, page_size: int) -> IntArray | None:
        """Returns the stream rows that need one more page at the next step, as places among stream rows, or None."""
        if self._increments is None:
            self._prepare(page_size)
        return self._crossings.get((self._steps_since + 1) % page_size)

    def order_pages(self, crossings: IntArray) -> tuple[IntArray, Int32Array]:
        """Returns the crossing rows' streams and the pages each needs, in the order in which they are given."""
        if self._page_ranks is not None:
            crossings = crossings[np.argsort(self._page_ranks[crossings])]
        needed: Int32Array = self._num_pages[self._rows_of(crossings)] + 1
        return self.rows.row_streams[crossings], needed

    def measure_next(self, crossings: IntArray | None) -> int:
        """Returns an upper bound for the bytes of the next step's plan."""
        if crossings is None:
            return self.num_bytes
        return self.num_bytes + len(crossings) * ITEM_BYTES + len(self._extents) * ALIGNMENT_BYTES

    def advance(self, streams: StreamTable, page_size: int, crossings: IntArray | None) -> None:
        """Moves the entry on by one step; the crossing rows' streams hold their new page already."""
        assert self._increments is not None
        self.tally.num_hits += 1
        self._steps_since += 1
        self._fixed += self._increments
        if crossings is not None:
            self._cross(streams, page_size, crossings)

    def write(self, buffer_set: BufferSet) -> None:
        """Writes the plan; indices only if the set does not hold them from an earlier step."""
        items = buffer_set.items
        items[: len(self._fixed)] = self._fixed
        if buffer_set.content is not self._content:
            for extent, start, end in zip(self._extents, self._bounds, self._bounds[1:], strict=False):
                first = extent.offsets[_KV_INDICES] // ITEM_BYTES
                items[first : first + end - start] = self._indices[start:end]
            buffer_set.content = self._content

    def _prepare(self, page_size: int) -> None:
        """Finds the items that a step changes, and which rows cross a page when."""
        rows = self.rows
        ends_of_spans = np.cumsum(rows.spans) - 1
        places = []
        token = 0
        for i, extent in enumerate(self._extents):
            first, end = rows.bounds[i], rows.bounds[i + 1]
            row = np.arange(end - first)
            last_token = ends_of_spans[first:end] - token
            token += extent.num_tokens
            offsets = [offset // ITEM_BYTES for offset in extent.offsets]
            places.append(
                np.stack(
                    (
                        offsets[_LAST] + row,
                        offsets[_SLOTS] + last_token,
                        offsets[_KV_LENS] + row,
                        offsets[_POSITIONS] + last_token,
                    )
                )
            )
            self._kv_indptrs.append(views_of(extent, self._fixed)[_KV_INDPTR][1:])
        all_places = np.concatenate(places, axis=1)
        self._places = all_places if rows.stream_rows is None else all_places[:, rows.stream_rows]
        self._increments = np.zeros_like(self._fixed)
        self._increments[self._places] = 1
        kv_lens = self._first_kv_lens if rows.stream_rows is None else self._first_kv_lens[rows.stream_rows]
        phases = (1 - kv_lens) % page_size
        order = np.argsort(phases, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(phases[order])) + 1):
            if len(group):
                self._crossings[int(phases[group[0]])] = group

    def _rows_of(self, stream_rows: IntArray) -> IntArray:
        return stream_rows if self.rows.stream_rows is None else self.rows.stream_rows[stream_rows]

    def _cross(self, streams: StreamTable, page_size: int, crossings: IntArray) -> None:
        rows = self._rows_of(crossings)
        tables = streams.tables
        pages = tables.arena[tables.starts[self.rows.row_streams[crossings]] + self._num_pages[rows]]
        self._fixed[self._places[0, crossings]] = 1
        self._fixed[self._places[1, crossings]] = pages * np.int32(page_size)
        self._num_pages[rows] += 1
        if len(crossings) > _MAX_SPLICES:
            self._indices = gather_indices(tables.starts[self.rows.streams], self._num_pages, tables.arena)
        else:
            self._indices = _splice(self._indices, self._ends[rows], pages)
        self._shift_bounds(rows)
        self._content = object()

    def _shift_bounds(self, rows: IntArray) -> None:
        """Makes room for one more page in each of these rows: `paged_kv_indptr`, bounds and extents."""
        added = np.zeros(len(self._num_pages), dtype=np.int32)
        added[rows] = 1
        np.cumsum(added, dtype=np.int32, out=added)
        self._ends += added
        extents = []
        start = self._extents[0].offsets[_KV_INDICES]
        num_before = 0
        for i, extent in enumerate(self._extents):
            first, end = self.rows.bounds[i], self.rows.bounds[i + 1]
            self._kv_indptrs[i] += added[first:end] - num_before if num_before else added[first:end]
            num_added = int(added[end - 1])
            self._bounds[i + 1] += num_added
            num_indices = extent.num_indices + num_added - num_before
            num_before = num_added
            offsets = (*extent.offsets[:_KV_INDICES], start, *extent.offsets[_KV_INDICES + 1 :])
            extents.append(ArraysExtent(extent.name, extent.num_rows, extent.num_tokens, num_indices, offsets))
            start += -(-num_indices * ITEM_BYTES // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._extents = tuple(extents)

    @staticmethod
    def _end_of(extents: Sequence[ArraysExtent]) -> int:
        last = extents[-1]
        return -(-(last.offsets[_KV_INDICES] + last.num_indices * ITEM_BYTES) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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
        if is_other.any():
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
