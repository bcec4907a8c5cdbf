"""Where arrays stand in a buffer set."""

from hypothesis import given
from hypothesis import strategies as st

from planner_service.core.arrays import ARRAY_NAMES, build_extents, count_items

sizes = st.tuples(st.integers(1, 70), st.integers(0, 300), st.integers(0, 300))


def test_arrays_are_named_in_the_order_of_the_wire() -> None:
    """The order of offsets on the wire is part of the contract."""
    assert ARRAY_NAMES == (
        "qo_indptr",
        "paged_kv_indptr",
        "paged_kv_indices",
        "paged_kv_last_page_len",
        "kv_lens",
        "slot_mapping",
        "positions",
    )


def test_the_two_indptr_arrays_have_one_element_more_than_rows() -> None:
    """Sizes are those of the array definitions."""
    assert count_items(num_rows=3, num_tokens=7, num_indices=11) == (4, 4, 11, 3, 3, 7, 7)


@given(st.lists(sizes, min_size=1, max_size=4))
def test_arrays_stand_on_64_byte_bounds_and_never_overlap(labels: list[tuple[int, int, int]]) -> None:
    """One contiguous run holds every array, aligned, none over another, with less than 64 bytes between them."""
    extents, num_bytes = build_extents([(f"label{place}", *size) for place, size in enumerate(labels)])
    assert [extent.name for extent in extents] == [f"label{place}" for place in range(len(labels))]
    spans = []
    for extent, size in zip(extents, labels, strict=True):
        assert (extent.num_rows, extent.num_tokens, extent.num_indices) == size
        counts = (size[0] + 1, size[0] + 1, size[2], size[0], size[0], size[1], size[1])
        for offset, count in zip(extent.offsets, counts, strict=True):
            assert offset % 64 == 0
            spans.append((offset, offset + 4 * count))
    spans = sorted(span for span in spans if span[0] < span[1])
    end = 0
    for first, last in spans:
        assert 0 <= first - end < 64
        end = last
    assert 0 <= num_bytes - end < 64
    assert num_bytes % 64 == 0
