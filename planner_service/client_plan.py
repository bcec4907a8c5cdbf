"""Plans as an engine reads them: numpy views of shared memory, never a copy."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from planner_service.client_layout import LayoutLabel, RowKeys
from planner_service.core.arrays import ArraysExtent
from planner_service.core.layout import Int32Array
from planner_service.errors import RegionUnavailableError
from planner_service.messages import PlanSource
from planner_service.region import map_region
from ringplan.planner.v1 import planner_pb2

ITEM_BYTES = 4
NO_PAGE_COPIES: Int32Array = np.zeros((0, 2), dtype=np.int32)
NO_PAGE_COPIES.flags.writeable = False

_SOURCES = {
    planner_pb2.PLAN_SOURCE_FULL: PlanSource.FULL,
    planner_pb2.PLAN_SOURCE_CACHED: PlanSource.CACHED,
    planner_pb2.PLAN_SOURCE_VERIFIED: PlanSource.VERIFIED,
}


@dataclass(eq=False, slots=True)
class PlanArrays:
    """The index arrays of one plan label: read-only int32 views, valid as long as anything refers to them.

    What stands in them is the plan only until the step is released. Row r has span `q[r]`.

    Args:
        name: the plan label.
        rows: the (request, label) of each row; None is a padding row.
        qo_indptr: shape [num_rows + 1].
        paged_kv_indptr: shape [num_rows + 1].
        paged_kv_indices: shape [num_indices].
        paged_kv_last_page_len: shape [num_rows].
        kv_lens: shape [num_rows], in tokens.
        slot_mapping: shape [num_tokens].
        positions: shape [num_tokens].
        extent: where the arrays stand, in bytes from the set's start.
    """

    name: str
    rows: RowKeys
    qo_indptr: Int32Array
    paged_kv_indptr: Int32Array
    paged_kv_indices: Int32Array
    paged_kv_last_page_len: Int32Array
    kv_lens: Int32Array
    slot_mapping: Int32Array
    positions: Int32Array
    extent: ArraysExtent


@dataclass(eq=False, slots=True)
class Plan:
    """One step's plan.

    Args:
        step_id: the step.
        source: how the plan came to be.
        labels: the arrays of each plan label, in the layout's order.
        page_copies_before: pages to copy before the forward, int32 [n, 2] of (source page, target page), in order.
        page_copies_after: pages to copy after the forward and before any later step; the same shape.
        region_id: the region that holds the arrays.
        region_buffer: that whole region, writable uint8; one array object for each region, never another.
        set_offset: where the plan's buffer set starts in the region, in bytes.
        num_bytes: bytes of the set in use: one copy of them moves the whole plan.
    """

    step_id: int
    source: PlanSource
    labels: dict[str, PlanArrays]
    page_copies_before: Int32Array
    page_copies_after: Int32Array
    region_id: int
    region_buffer: npt.NDArray[np.uint8] = field(repr=False)
    set_offset: int
    num_bytes: int


class PlanReader:
    """Turns the planner's handles into plans. Used by the reader thread alone."""

    def __init__(self) -> None:
        self._regions: dict[int, _RegionViews] = {}
        self._failures: dict[int, RegionUnavailableError] = {}

    def map_region(self, region: planner_pb2.Region) -> bool:
        """Maps a region; returns whether that succeeded.

        A failure shows only when a plan is read there: the planner may have given a region up, name and all, because
        every plan in it had been discarded before it got here.
        """
        try:
            # The buffer alone keeps the mapping: it ends with the last view of it.
            buffer = map_region(region.path, region.num_bytes).buffer
        except RegionUnavailableError as error:
            self._failures[region.region_id] = error
            return False
        self._regions[region.region_id] = _RegionViews(buffer, tuple(region.set_offsets))
        return True

    def check_regions(self) -> None:
        """Raises what kept a region from being mapped.

        Raises:
            RegionUnavailableError: a region could not be mapped.
        """
        for error in self._failures.values():
            raise error

    def read(self, plan: planner_pb2.Plan, labels: Sequence[LayoutLabel]) -> Plan:
        """Returns the plan of a layout with these `labels`.

        Raises:
            ValueError: the handle does not fit the layout or its region.
            RegionUnavailableError: the plan's region could not be mapped.
        """
        region = self._find_region(plan.region_id)
        if plan.set_index >= len(region.set_offsets):
            raise ValueError(f"step {plan.step_id} stands in set {plan.set_index} of {len(region.set_offsets)}")
        set_offset = region.set_offsets[plan.set_index]
        if set_offset + plan.num_bytes > region.buffer.nbytes:
            raise ValueError(f"step {plan.step_id} ends {plan.num_bytes} bytes into its set: beyond the region's end")
        if plan.source not in _SOURCES:
            raise ValueError(f"step {plan.step_id} has source {plan.source}, which is none")
        base = set_offset // ITEM_BYTES
        arrays = {arrays.name: arrays for arrays in plan.plan_labels}
        if len(arrays) != len(labels) or not all(label.name in arrays for label in labels):
            raise ValueError(f"step {plan.step_id} has the plan labels {list(arrays)}, its layout has others")
        return Plan(
            step_id=plan.step_id,
            source=_SOURCES[plan.source],
            labels={label.name: _view_arrays(region.items, base, arrays[label.name], label) for label in labels},
            page_copies_before=_read_page_copies(plan.page_copies_before),
            page_copies_after=_read_page_copies(plan.page_copies_after),
            region_id=plan.region_id,
            region_buffer=region.buffer,
            set_offset=set_offset,
            num_bytes=plan.num_bytes,
        )

    def _find_region(self, region_id: int) -> "_RegionViews":
        region = self._regions.get(region_id)
        if region is None:
            raise self._failures.get(region_id) or ValueError(f"no region {region_id} was announced")
        if len(self._regions) > 1:
            # Plans never go back to an older region: it is unmapped when the engine's last view of it is gone.
            self._regions = {known: views for known, views in self._regions.items() if known >= region_id}
        return region


class _RegionViews:
    """A region as bytes for the engine, and as read-only int32 for the views of plans."""

    __slots__ = ("buffer", "items", "set_offsets")

    def __init__(self, buffer: npt.NDArray[np.uint8], set_offsets: tuple[int, ...]) -> None:
        self.buffer = buffer
        self.items: Int32Array = buffer[: buffer.nbytes // ITEM_BYTES * ITEM_BYTES].view("<i4")
        self.items.flags.writeable = False
        self.set_offsets = set_offsets


def _view_arrays(items: Int32Array, base: int, arrays: planner_pb2.PlanArrays, label: LayoutLabel) -> PlanArrays:
    name, num_rows = label.name, len(label.rows)
    num_tokens, num_indices = arrays.num_tokens, arrays.num_indices
    offsets = tuple(arrays.offsets)
    if arrays.num_rows != num_rows:
        raise ValueError(f"plan label {name!r} has {arrays.num_rows} rows in the plan, {num_rows} in the layout")
    qo, indptr, indices, last, lens, slots, positions = [base + offset // ITEM_BYTES for offset in offsets]
    return PlanArrays(
        name,
        label.rows,
        items[qo : qo + num_rows + 1],
        items[indptr : indptr + num_rows + 1],
        items[indices : indices + num_indices],
        items[last : last + num_rows],
        items[lens : lens + num_rows],
        items[slots : slots + num_tokens],
        items[positions : positions + num_tokens],
        ArraysExtent(name, num_rows, num_tokens, num_indices, offsets),
    )


def _read_page_copies(packed: bytes) -> Int32Array:
    return np.frombuffer(packed, dtype="<i4").reshape(-1, 2) if packed else NO_PAGE_COPIES
