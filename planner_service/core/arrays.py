"""Where the arrays of a plan stand in a buffer set."""

from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT_BYTES = 64
ITEM_BYTES = 4  # every array holds int32

# The order in which offsets are given, on the wire too.
ARRAY_NAMES = (
    "qo_indptr",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_len",
    "kv_lens",
    "slot_mapping",
    "positions",
)


class ArraysExtent(NamedTuple):
    """Where one plan label's arrays stand.

    Args:
        name: the plan label.
        num_rows: rows.
        num_tokens: query tokens.
        num_indices: elements of `paged_kv_indices`.
        offsets: bytes from the set's start, in the order of `ARRAY_NAMES`.
    """

    name: str
    num_rows: int
    num_tokens: int
    num_indices: int
    offsets: tuple[int, ...]


def count_items(num_rows: int, num_tokens: int, num_indices: int) -> tuple[int, ...]:
    """Returns the number of elements of each array, in the order of `ARRAY_NAMES`."""
    return (num_rows + 1, num_rows + 1, num_indices, num_rows, num_rows, num_tokens, num_tokens)


def build_extents(sizes: Sequence[tuple[str, int, int, int]]) -> tuple[tuple[ArraysExtent, ...], int]:
    """Places the arrays of a plan in one contiguous run, each on a 64-byte bound.

    Arrays whose size is fixed by the rows come first, plan label by plan label, then every label's
    `paged_kv_indices`: what a decode step changes between page crossings is one run of its own.

    Args:
        sizes: (plan label, num_rows, num_tokens, num_indices) for each plan label, in order.

    Returns:
        The extents in the same order, and the bytes of the whole run.
    """
    starts: list[list[int]] = []
    end = 0
    for _, num_rows, num_tokens, num_indices in sizes:
        label_starts = []
        for name, count in zip(ARRAY_NAMES, count_items(num_rows, num_tokens, num_indices), strict=True):
            label_starts.append(end)
            if name != "paged_kv_indices":
                end += align(count * ITEM_BYTES)
        starts.append(label_starts)
    extents = []
    for (label, num_rows, num_tokens, num_indices), label_starts in zip(sizes, starts, strict=True):
        label_starts[ARRAY_NAMES.index("paged_kv_indices")] = end
        end += align(num_indices * ITEM_BYTES)
        extents.append(ArraysExtent(label, num_rows, num_tokens, num_indices, tuple(label_starts)))
    return tuple(extents), end


def align(num_bytes: int) -> int:
    """Returns the next 64-byte bound."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
