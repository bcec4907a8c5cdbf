"""The ring of buffer sets: which set holds which plan, and until when."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from planner_service.core.arrays import align, build_extents
from planner_service.core.layout import Int32Array
from planner_service.errors import RegionUnavailableError

MAX_SET_BYTES = 1 << 31
_FIRST_SET_ROWS = 1_024
_FIRST_SET_TOKENS = 4_096
_FIRST_SET_INDICES = 65_536


@dataclass(frozen=True, slots=True)
class RegionDescription:
    """A shared-memory file that holds buffer sets; sizes and offsets in bytes."""

    region_id: int
    path: str
    num_bytes: int
    set_bytes: int
    set_offsets: tuple[int, ...]


class RegionMemory(Protocol):
    """A region's memory.

    Attributes:
        description: what the engine is told of it.
        buffer: the whole region, uint8, writable, on a 64-byte bound.
        locked_bytes: how much of it is locked in memory.
    """

    description: RegionDescription
    buffer: npt.NDArray[np.uint8]
    locked_bytes: int

    def unlink(self) -> None:
        """Removes the file's name; mappings stay. May be called again."""

    def close(self) -> None:
        """Unlinks and unmaps. May be called again."""


AllocateRegion = Callable[[int, int, int], RegionMemory]  # (region_id, num_sets, set_bytes)


@dataclass(frozen=True, slots=True)
class Lease:
    """A set that the engine holds, from publication (`since_seconds`, on the session's clock) until its release."""

    step_id: int
    region_id: int
    set_index: int
    since_seconds: float


@dataclass(slots=True)
class BufferSet:
    """The memory of one plan.

    Args:
        region_id: its region.
        set_index: its place there.
        items: the set as int32.
        content: what the last plan left here, for whoever wrote it; None if nothing is known.

    Attributes:
        memory: the same items; a small copy to it takes half of what numpy takes.
    """

    region_id: int
    set_index: int
    items: Int32Array
    content: object = None
    memory: "memoryview[int]" = field(init=False)

    def __post_init__(self) -> None:
        self.memory = self.items.data


class Ring:
    """`depth` buffer sets, of which each holds one plan at a time; it grows when a plan needs a larger set.

    Args:
        depth: the number of sets, and of leases at most.
        set_bytes: first size of a set.
        allocate: makes a region.

    Raises:
        RegionUnavailableError: there is no memory for the first region.
    """

    def __init__(self, depth: int, set_bytes: int, allocate: AllocateRegion) -> None:
        self.depth = depth
        self._allocate = allocate
        self._regions: dict[int, RegionMemory] = {}
        self._leases: dict[int, Lease] = {}  # by step, oldest first
        self._num_leased: dict[int, int] = {}  # by region
        self._free: list[BufferSet] = []  # sets of the newest region
        self._leased_sets: dict[int, BufferSet] = {}  # by step
        self._add_region(align(set_bytes))

    @property
    def newest_region(self) -> RegionMemory:
        """The region that new plans are written to."""
        return self._regions[max(self._regions)]

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases, oldest first."""
        return tuple(self._leases.values())

    @property
    def num_leased(self) -> int:
        """The sets that the engine holds."""
        return len(self._leases)

    @property
    def num_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(len(region.buffer) for region in self._regions.values())

    @property
    def locked_bytes(self) -> int:
        """Bytes of all regions that are locked in memory."""
        return sum(region.locked_bytes for region in self._regions.values())

    def list_regions_after(self, region_id: int) -> list[RegionMemory]:
        """Returns the regions newer than this one that still stand, oldest first."""
        return [self._regions[known_id] for known_id in sorted(self._regions) if known_id > region_id]

    def has_free_set(self) -> bool:
        """Whether a plan could be written now."""
        return len(self._leases) < self.depth

    def find_free_set(self, num_bytes: int) -> BufferSet:
        """Returns the set the next plan goes to; it is free until it is leased. Needs `has_free_set()`.

        Args:
            num_bytes: what the plan takes; a larger region is made if no set holds it.

        Raises:
            RegionUnavailableError: there is no memory for a larger region; nothing has changed.
        """
        assert self.has_free_set()
        if num_bytes > self.newest_region.description.set_bytes:
            self._grow(align(num_bytes))
        return self._free[0]

    def lease(self, buffer_set: BufferSet, step_id: int, now_seconds: float) -> None:
        """Hands the set found last to the engine, for a step later than every leased one."""
        assert self._free[0] is buffer_set
        del self._free[0]
        self._leases[step_id] = Lease(step_id, buffer_set.region_id, buffer_set.set_index, now_seconds)
        self._leased_sets[step_id] = buffer_set
        self._num_leased[buffer_set.region_id] += 1

    def release_through(self, step_id: int) -> int:
        """Ends the leases of a step and all before it; returns how many ended."""
        return self._release([step for step in self._leases if step <= step_id])

    def release_from(self, step_id: int) -> int:
        """Ends the leases of a step and all after it; returns how many ended."""
        return self._release([step for step in self._leases if step >= step_id])

    def unlink_through(self, region_id: int) -> None:
        """Removes the file names of a region and those before it: the engine has mapped them."""
        for known_id, region in self._regions.items():
            if known_id <= region_id:
                region.unlink()

    def close(self) -> None:
        """Gives all memory up. May be called again."""
        self._free.clear()
        self._leased_sets.clear()
        self._leases.clear()
        for region in self._regions.values():
            region.close()

    def check_integrity(self) -> None:
        """Asserts that every set is leased once or free once."""
        newest = self.newest_region.description.region_id
        held = [(lease.region_id, lease.set_index) for lease in self._leases.values()]
        held += [(buffer_set.region_id, buffer_set.set_index) for buffer_set in self._free]
        assert len(held) == len(set(held)), "a set is leased twice, or leased and free"
        in_newest = [held_set for held_set in held if held_set[0] == newest]
        assert len(in_newest) == self.depth, "a set of the newest region is lost"
        assert list(self._leases) == sorted(self._leases), "leases are out of order"

    def _release(self, step_ids: list[int]) -> int:
        for step_id in step_ids:
            lease = self._leases.pop(step_id)
            buffer_set = self._leased_sets.pop(step_id)
            self._num_leased[lease.region_id] -= 1
            if lease.region_id == self.newest_region.description.region_id:
                self._free.append(buffer_set)
            elif not self._num_leased[lease.region_id]:
                self._close_region(lease.region_id)
        return len(step_ids)

    def _grow(self, set_bytes: int) -> None:
        """Makes a region of larger sets: twice as large if there is memory for that, else as large as they must be."""
        doubled = min(2 * self.newest_region.description.set_bytes, MAX_SET_BYTES)
        if set_bytes < doubled:
            with suppress(RegionUnavailableError):
                return self._add_region(doubled)
        return self._add_region(set_bytes)

    def _add_region(self, set_bytes: int) -> None:
        if set_bytes > MAX_SET_BYTES:
            raise RegionUnavailableError(set_bytes * self.depth, f"a set of more than {MAX_SET_BYTES} bytes")
        old = max(self._regions, default=0)
        region = self._allocate(old + 1, self.depth, set_bytes)
        region_id = region.description.region_id
        self._regions[region_id] = region
        self._num_leased[region_id] = 0
        items = region.buffer.view(np.int32)
        size = set_bytes // items.itemsize
        self._free = [
            BufferSet(region_id, index, items[offset // items.itemsize :][:size])
            for index, offset in enumerate(region.description.set_offsets)
        ]
        if old and not self._num_leased[old]:
            self._close_region(old)

    def _close_region(self, region_id: int) -> None:
        del self._num_leased[region_id]
        self._regions.pop(region_id).close()


def choose_set_bytes(num_pages: int, max_streams: int) -> int:
    """Returns a first size of a set that most plans fit, in bytes; the ring grows for the others."""
    num_rows = min(max_streams, _FIRST_SET_ROWS)
    num_indices = min(num_pages, _FIRST_SET_INDICES)
    _, num_bytes = build_extents([("", num_rows, max(num_rows, _FIRST_SET_TOKENS), num_indices)])
    return num_bytes
