"""Rows of a plan grouped by shape, so that each group is one dense attention call."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner_service.client import PlanArrays

Int64Array = npt.NDArray[np.int64]

# Rows with at most so many query tokens are padded to a common span; longer ones are a group each.
MAX_GROUPED_SPAN = 16

# Keys and values that a group gathers, at most: what stays in a processor's cache is read back many times faster.
MAX_GROUP_BYTES = 4 << 20

# Tokens read in vain that cost about as much as one more attention call.
_WASTED_TOKENS_PER_CALL = 256


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are attended together, padded to a common span Q and a common length L.

    Args:
        slots: int64 [R, L], the slot of each token a row reads; beyond the row's end, its first slot again.
        token_index: int64 [R, Q], each row's query tokens among the label's; beyond the row's span, its first again.
        kv_lens: int64 [R].
        spans: int64 [R].
    """

    slots: Int64Array
    token_index: Int64Array
    kv_lens: Int64Array
    spans: Int64Array


def build_row_groups(arrays: PlanArrays, *, page_size: int, bytes_per_token: int) -> list[RowGroup]:
    """Groups the rows of a plan label that have query tokens.

    Args:
        arrays: the plan label's index arrays.
        page_size: tokens a page holds.
        bytes_per_token: bytes of one token's key and value in one layer.

    Returns:
        The groups; every query token stands in exactly one.
    """
    starts = arrays.qo_indptr[:-1].astype(np.int64)
    spans = np.diff(arrays.qo_indptr).astype(np.int64)
    kv_lens = arrays.kv_lens.astype(np.int64)
    groups = []
    for rows in _split_rows(spans, kv_lens, bytes_per_token):
        row_spans, row_lens, row_starts = spans[rows], kv_lens[rows], starts[rows]
        query_offsets = np.arange(row_spans.max())
        token_index = row_starts[:, None] + np.where(query_offsets < row_spans[:, None], query_offsets, 0)
        slots = _find_slots(arrays, rows, row_lens, page_size)
        groups.append(RowGroup(slots, token_index, row_lens, row_spans))
    return groups


def _split_rows(spans: Int64Array, kv_lens: Int64Array, bytes_per_token: int) -> Iterator[Int64Array]:
    """Yields the rows of each group; one that fits a single group stays in batch order."""
    for rows in (np.flatnonzero(spans == 1), np.flatnonzero((spans > 1) & (spans <= MAX_GROUPED_SPAN))):
        if not rows.size:
            continue
        lens = kv_lens[rows]
        if _fits_one_group(lens, bytes_per_token):
            yield rows
        else:
            order = np.argsort(-lens, kind="stable")
            yield from _cut_sorted(rows[order], lens[order], bytes_per_token)
    for row in np.flatnonzero(spans > MAX_GROUPED_SPAN):
        yield np.array([row])


def _fits_one_group(lens: Int64Array, bytes_per_token: int) -> bool:
    padded = int(lens.max()) * lens.size
    return padded * bytes_per_token <= MAX_GROUP_BYTES and not _is_wasteful(padded, int(lens.sum()))


def _is_wasteful(num_padded: int, num_real: int) -> bool:
    return num_padded - num_real > _WASTED_TOKENS_PER_CALL + num_real // 4


def _cut_sorted(rows: Int64Array, lens: Int64Array, bytes_per_token: int) -> Iterator[Int64Array]:
    first, num_real = 0, 0
    longest = int(lens[0])
    for place, length in enumerate(lens.tolist()):
        padded = (place + 1 - first) * longest
        too_large = padded * bytes_per_token > MAX_GROUP_BYTES
        if place > first and (too_large or _is_wasteful(padded, num_real + length)):
            yield rows[first:place]
            first, num_real, longest = place, 0, length
        num_real += length
    yield rows[first:]


def _find_slots(arrays: PlanArrays, rows: Int64Array, lens: Int64Array, page_size: int) -> Int64Array:
    # Beyond a row's end stands its first slot once more: a value the row wrote, so that nothing a page holds elsewhere,
    # NaN not excluded, takes part in any sum. Its weight is 0.
    places = np.arange(lens.max())
    places = np.where(places < lens[:, None], places, 0)
    first_pages = arrays.paged_kv_indptr[rows].astype(np.int64)
    pages = arrays.paged_kv_indices[first_pages[:, None] + places // page_size].astype(np.int64)
    slots: Int64Array = pages * page_size + places % page_size
    return slots
