"""The ring: leases, release, growth."""

import pytest

from planner_service.core.ring import BufferSet, Ring
from planner_service.errors import RegionUnavailableError
from tests.planner_service.mirrored_session import PlainRegion


class Allocator:
    """Makes plain regions, as long as there is memory."""

    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        self.regions: list[PlainRegion] = []
        self.limit_bytes = limit_bytes

    def __call__(self, region_id: int, num_sets: int, set_bytes: int) -> PlainRegion:
        """Makes a region."""
        if num_sets * set_bytes > self.limit_bytes:
            raise RegionUnavailableError(num_sets * set_bytes, "too large")
        self.regions.append(PlainRegion(region_id, num_sets, set_bytes))
        return self.regions[-1]


def lease(ring: Ring, step_id: int, num_bytes: int = 64) -> BufferSet:
    """Leases a set for a step."""
    buffer_set = ring.find_free_set(num_bytes)
    ring.lease(buffer_set, step_id, 0.0)
    ring.check_integrity()
    return buffer_set


def test_every_lease_has_a_set_of_its_own() -> None:
    """As many sets as the ring is deep are leased, all different; then none is free."""
    ring = Ring(3, 128, Allocator())
    sets = [lease(ring, step) for step in (1, 2, 3)]
    assert {buffer_set.set_index for buffer_set in sets} == {0, 1, 2}
    assert not ring.has_free_set()
    for index, buffer_set in enumerate(sets):
        buffer_set.items[:] = index
    assert [int(buffer_set.items.max()) for buffer_set in sets] == [0, 1, 2]


def test_a_release_is_cumulative_and_a_discard_releases_from_the_other_end() -> None:
    """Releases end leases up to a step, discards from one on."""
    ring = Ring(4, 128, Allocator())
    for step in (2, 3, 5, 8):
        lease(ring, step)
    assert ring.release_through(4) == 2
    assert ring.release_from(6) == 1
    assert [held.step_id for held in ring.leases] == [5]
    assert ring.release_through(4) == 0
    ring.check_integrity()


def test_the_oldest_set_is_used_again_first() -> None:
    """Sets go round, so an engine reads each as long as possible after its release."""
    ring = Ring(2, 128, Allocator())
    first, second = lease(ring, 1), lease(ring, 2)
    ring.release_through(2)
    assert [lease(ring, 3), lease(ring, 4)] == [first, second]


def test_a_plan_that_no_set_holds_grows_the_ring() -> None:
    """The new region has as many sets; the old one stays until its last lease ends."""
    allocator = Allocator()
    ring = Ring(2, 128, allocator)
    lease(ring, 1)
    grown = lease(ring, 2, 1_000)
    assert grown.items.nbytes >= 1_000
    assert grown.region_id == 2
    assert not ring.has_free_set()
    ring.release_through(1)
    assert allocator.regions[0].is_closed
    ring.release_through(2)
    ring.check_integrity()
    assert not allocator.regions[1].is_closed
    assert ring.num_bytes == len(allocator.regions[1].buffer)


def test_a_ring_grows_by_less_where_memory_is_short() -> None:
    """Sets are doubled at least, so that growing is rare; without memory for that they are as large as they must be."""
    allocator = Allocator(limit_bytes=2 * 1_500)
    ring = Ring(2, 1_024, allocator)
    assert lease(ring, 1, 1_100).items.nbytes == 1_152
    assert [len(region.buffer) for region in allocator.regions] == [2 * 1_024, 2 * 1_152]


def test_a_ring_that_cannot_grow_stays_as_it_was() -> None:
    """Without memory for a larger region the old sets serve on."""
    ring = Ring(2, 128, Allocator(limit_bytes=4_096))
    with pytest.raises(RegionUnavailableError):
        ring.find_free_set(1 << 20)
    ring.check_integrity()
    assert lease(ring, 1).region_id == 1


def test_a_ring_needs_memory_for_its_first_region() -> None:
    """Without it there is no ring."""
    with pytest.raises(RegionUnavailableError):
        Ring(2, 128, Allocator(limit_bytes=128))


def test_unlinking_takes_the_name_of_a_region_and_of_those_before_it() -> None:
    """What the engine has mapped needs no name; what it has not mapped keeps its own."""
    allocator = Allocator()
    ring = Ring(3, 128, allocator)
    lease(ring, 1)
    lease(ring, 2, 1_000)
    ring.unlink_through(1)
    assert [region.is_unlinked for region in allocator.regions] == [True, False]
    ring.close()
    ring.close()
    assert all(region.is_closed for region in allocator.regions)
