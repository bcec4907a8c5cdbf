"""A KV pool that holds token numbers: shows whether plans, run in order, read exactly what their streams hold."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from planner_service.client import PlanArrays
from ringplan_cli.conformance.difference import NOTHING, Difference

SINK_PAGE = 0
NO_TOKEN = -1
StreamKey = tuple[object, str]
Forks = Iterable[tuple[StreamKey, StreamKey]]
Tokens = npt.NDArray[np.int64]


class TokenPool:
    """Runs plans as an engine would. Every token is a number of its own, so any mix-up shows when it is read.

    Args:
        page_size: tokens a page holds.
        num_pages: pages in the pool.
    """

    def __init__(self, page_size: int, num_pages: int) -> None:
        self._page_size = page_size
        self._num_pages = num_pages
        self._pages: dict[int, Tokens] = {}  # those that have been written to
        self._blank = np.full(page_size, NO_TOKEN, dtype=np.int64)
        self._contents: dict[StreamKey, list[int]] = {}
        self._origins: list[tuple[StreamKey | None, int]] = []  # each token's row, and its place there

    def fork(self, forks: Forks) -> None:
        """Makes targets equal to sources, in order."""
        for source, target in forks:
            self._contents[target] = list(self._contents.get(source, ()))

    def copy_pages(self, copies: npt.NDArray[np.int32]) -> None:
        """Copies pages in order; shape [n, 2], (source page, target page)."""
        for source, target in copies.tolist():
            self._pages[target] = self._pages.get(source, self._blank).copy()

    def truncate(self, key: StreamKey, length: int) -> None:
        """Cuts a stream back."""
        self._contents[key] = self._contents.get(key, [])[:length]

    def length(self, key: StreamKey) -> int:
        """Returns how many tokens a stream holds."""
        return len(self._contents.get(key, ()))

    def drop(self, key: StreamKey) -> None:
        """Ends a stream."""
        self._contents.pop(key, None)

    def run(self, labels: Iterable[PlanArrays], *, keep: bool) -> Difference | None:
        """Writes every row's new tokens, then reads every row.

        Args:
            labels: the arrays of every plan label of the step.
            keep: whether the tokens stay with their streams.

        Returns:
            The first thing that is wrong, or None if every row reads what its stream holds.
        """
        labels = list(labels)
        for arrays in labels:
            fault = next(self._find_faults(arrays), None)
            if fault is not None:
                return fault
        held: dict[StreamKey, list[int]] = {}
        for arrays in labels:
            for row, key in enumerate(arrays.rows):
                tokens = self._write(arrays, row)
                if key is not None:
                    held[key] = self._contents.get(key, []) + tokens
        for arrays in labels:
            for row, key in enumerate(arrays.rows):
                fault = None if key is None else self._compare(arrays, row, held[key])
                if fault is not None:
                    return fault
        if keep:
            self._contents.update(held)
        return None

    def _find_faults(self, arrays: PlanArrays) -> Iterator[Difference]:
        """Looks at the arrays alone: sizes that fit each other, pages in the pool, slots in the pages of their rows."""
        label = arrays.name
        yield from _check_bounds(label, "qo_indptr", arrays.qo_indptr, len(arrays.positions))
        yield from _check_bounds(label, "paged_kv_indptr", arrays.paged_kv_indptr, len(arrays.paged_kv_indices))
        for row, key in enumerate(arrays.rows):
            yield from self._check_pages(arrays, row, is_padding=key is None)
        for row, key in enumerate(arrays.rows):
            yield from self._check_slots(arrays, row, is_padding=key is None)

    def _check_pages(self, arrays: PlanArrays, row: int, *, is_padding: bool) -> Iterator[Difference]:
        first, end = arrays.paged_kv_indptr[row : row + 2].tolist()
        pages = arrays.paged_kv_indices[first:end]
        low, high = (SINK_PAGE, SINK_PAGE) if is_padding else (1, self._num_pages - 1)
        is_wrong = (pages < low) | (pages > high)
        if is_wrong.any():
            index = int(np.flatnonzero(is_wrong)[0])
            want = f"page {low}..{high}" if high > low else f"page {low}"
            yield Difference("paged_kv_indices", first + index, want, int(pages[index]), arrays.name)
        last = int(arrays.paged_kv_last_page_len[row])
        if not (last == 0 if first == end else 1 <= last <= self._page_size):
            want = "0" if first == end else f"1..{self._page_size}"
            yield Difference("paged_kv_last_page_len", row, want, last, arrays.name)

    def _check_slots(self, arrays: PlanArrays, row: int, *, is_padding: bool) -> Iterator[Difference]:
        """Compares each token's slot with the page that its row reads at its position."""
        size = self._page_size
        first, end = arrays.qo_indptr[row : row + 2].tolist()
        positions, slots = arrays.positions[first:end], arrays.slot_mapping[first:end]
        pages = arrays.paged_kv_indices[arrays.paged_kv_indptr[row] : arrays.paged_kv_indptr[row + 1]]
        is_outside = (positions < 0) | (positions >= len(pages) * size)
        if is_outside.any():
            index = int(np.flatnonzero(is_outside)[0])
            want = f"0..{len(pages) * size - 1}, in its row's {len(pages)} pages"
            yield Difference("positions", first + index, want, int(positions[index]), arrays.name)
            return
        wanted = positions % size if is_padding else pages[positions // size].astype(np.int64) * size + positions % size
        is_wrong = slots != wanted
        if is_wrong.any():
            index = int(np.flatnonzero(is_wrong)[0])
            yield Difference("slot_mapping", first + index, int(wanted[index]), int(slots[index]), arrays.name)

    def _write(self, arrays: PlanArrays, row: int) -> list[int]:
        """Writes a row's new tokens; returns their numbers."""
        first, end = arrays.qo_indptr[row : row + 2].tolist()
        tokens = list(range(len(self._origins), len(self._origins) + end - first))
        self._origins += [(arrays.rows[row], place) for place in arrays.positions[first:end].tolist()]
        for token, slot in zip(tokens, arrays.slot_mapping[first:end].tolist(), strict=True):
            page, offset = divmod(slot, self._page_size)
            if page not in self._pages:
                self._pages[page] = self._blank.copy()
            self._pages[page][offset] = token
        return tokens

    def _compare(self, arrays: PlanArrays, row: int, held: Sequence[int]) -> Difference | None:
        """Compares what a row reads with what its stream holds."""
        first, end = arrays.paged_kv_indptr[row : row + 2].tolist()
        pages = arrays.paged_kv_indices[first:end].tolist()
        num_read = max(0, (end - first - 1) * self._page_size) + int(arrays.paged_kv_last_page_len[row])
        if num_read != len(held):
            return Difference("paged_kv_last_page_len", row, f"{len(held)} tokens", f"{num_read} tokens", arrays.name)
        if not held:
            return None
        read = np.concatenate([self._pages.get(page, self._blank) for page in pages])[:num_read]
        is_wrong = read != np.array(held)
        if not is_wrong.any():
            return None
        place = int(np.flatnonzero(is_wrong)[0])
        index = first + place // self._page_size
        got = f"page {pages[place // self._page_size]}, with {self._describe(int(read[place]))} there"
        want = f"the page with {self._describe(held[place])}"
        return Difference("paged_kv_indices", index, want, got, arrays.name)

    def _describe(self, token: int) -> str:
        if token == NO_TOKEN:
            return NOTHING
        key, place = self._origins[token]
        name = "padding" if key is None else f"{key[0]}.{key[1]}"
        return f"token {place} of {name}"


def _check_bounds(label: str, name: str, bounds: npt.NDArray[np.int32], num_items: int) -> Iterator[Difference]:
    """Checks a running sum: from 0, never falling, up to the number of items."""
    steps = np.diff(bounds)
    if bounds[0] != 0:
        yield Difference(name, 0, 0, int(bounds[0]), label)
    elif (steps < 0).any():
        index = int(np.flatnonzero(steps < 0)[0]) + 1
        yield Difference(name, index, f"{bounds[index - 1]} or more", int(bounds[index]), label)
    elif bounds[-1] != num_items:
        yield Difference(name, len(bounds) - 1, num_items, int(bounds[-1]), label)
