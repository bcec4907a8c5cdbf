"""A KV pool that holds token numbers: shows whether plans, run in order, read exactly what their streams hold."""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from planner_service.client import PlanArrays

SINK_PAGE = 0
StreamKey = tuple[object, str]
Forks = Iterable[tuple[StreamKey, StreamKey]]


class TokenPool:
    """Runs plans as an engine would. Every token is a number of its own, so any mix-up shows when it is read.

    Args:
        page_size: tokens a page holds.
        num_pages: pages in the pool.
    """

    def __init__(self, page_size: int, num_pages: int) -> None:
        self._page_size = page_size
        self._slots = np.full((num_pages, page_size), -1, dtype=np.int64)
        self._contents: dict[StreamKey, list[int]] = {}
        self._num_tokens = 0

    def fork(self, forks: Forks) -> None:
        """Makes targets equal to sources, in order."""
        for source, target in forks:
            self._contents[target] = list(self._contents.get(source, ()))

    def copy_pages(self, copies: npt.NDArray[np.int32]) -> None:
        """Copies pages in order; shape [n, 2], (source page, target page)."""
        for source, target in copies:
            self._slots[target] = self._slots[source]

    def truncate(self, key: StreamKey, length: int) -> None:
        """Cuts a stream back."""
        self._contents[key] = self._contents.get(key, [])[:length]

    def length(self, key: StreamKey) -> int:
        """Returns how many tokens a stream holds."""
        return len(self._contents.get(key, ()))

    def drop(self, key: StreamKey) -> None:
        """Ends a stream."""
        self._contents.pop(key, None)

    def run(self, labels: Iterable[PlanArrays], *, keep: bool) -> list[str]:
        """Writes every row's new tokens, then reads every row.

        Args:
            labels: the arrays of every plan label of the step.
            keep: whether the tokens stay with their streams.

        Returns:
            What is wrong, in words; empty if every row reads what its stream holds.
        """
        labels = list(labels)
        faults = [fault for arrays in labels for fault in self._find_slot_faults(arrays)]
        if faults:
            return faults
        held: dict[StreamKey, list[int]] = {}
        for arrays in labels:
            for row, key in enumerate(arrays.rows):
                if key is not None:
                    held[key] = self._contents.get(key, []) + self._write(arrays, row)
        for arrays in labels:
            for row, key in enumerate(arrays.rows):
                if key is not None and self._read(arrays, row) != held[key]:
                    faults.append(f"plan label {arrays.name!r}, row {row}: {key} reads {self._read(arrays, row)}")
        if keep:
            self._contents.update(held)
        return faults

    def _find_slot_faults(self, arrays: PlanArrays) -> Iterator[str]:
        """Compares each token's slot with the page that its row reads at its position."""
        size = self._page_size
        for row, key in enumerate(arrays.rows):
            first, end = arrays.qo_indptr[row : row + 2]
            positions, slots = arrays.positions[first:end], arrays.slot_mapping[first:end]
            pages = arrays.paged_kv_indices[arrays.paged_kv_indptr[row] : arrays.paged_kv_indptr[row + 1]]
            if key is None:
                expected = positions % size
            else:
                expected = pages[positions // size] * size + positions % size
                if np.any(pages == SINK_PAGE):
                    yield f"plan label {arrays.name!r}, row {row}: the sink page among {pages}"
            if not np.array_equal(slots, expected):
                yield f"plan label {arrays.name!r}, row {row}: slots {slots}, and its pages say {expected}"

    def _write(self, arrays: PlanArrays, row: int) -> list[int]:
        first, end = arrays.qo_indptr[row : row + 2]
        tokens = list(range(self._num_tokens, self._num_tokens + int(end - first)))
        self._num_tokens += len(tokens)
        self._slots.reshape(-1)[arrays.slot_mapping[first:end]] = tokens
        return tokens

    def _read(self, arrays: PlanArrays, row: int) -> list[int]:
        pages = arrays.paged_kv_indices[arrays.paged_kv_indptr[row] : arrays.paged_kv_indptr[row + 1]]
        tokens: list[int] = self._slots[pages].reshape(-1).tolist()
        return tokens[: len(tokens) - self._page_size + int(arrays.paged_kv_last_page_len[row])]
