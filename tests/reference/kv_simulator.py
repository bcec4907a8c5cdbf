"""A KV cache of token ids: shows whether plans, run in order, read what their streams hold."""

from collections.abc import Mapping, Sequence

from tests.reference.naive_planner import SINK_PAGE, Arrays, NaivePlan


class KvSimulator:
    """Runs plans over a cache whose slots hold token ids.

    Args:
        page_size: tokens a page holds.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[int, int] = {}

    def run(
        self,
        expected: NaivePlan,
        arrays: Mapping[str, Arrays],
        page_copies_before: Sequence[tuple[int, int]],
        page_copies_after: Sequence[tuple[int, int]],
    ) -> None:
        """Runs one step as an engine would: copies, writes, reads, copies.

        Args:
            expected: what the rows write, and what their pages must hold then.
            arrays: plan label -> the arrays to obey.
            page_copies_before: (source page, target page), in order.
            page_copies_after: the same, after the step.

        Raises:
            AssertionError: a row reads something else than its stream holds, or two rows write one slot.
        """
        self._copy_pages(page_copies_before)
        written: set[int] = set()
        for label, label_arrays in arrays.items():
            tokens = [token for row in expected.written[label] for token in row]
            slots = [slot for slot in label_arrays["slot_mapping"] if slot // self.page_size != SINK_PAGE]
            assert len(slots) == len(tokens), f"{label}: {len(slots)} slots for {len(tokens)} tokens"
            for slot, token in zip(slots, tokens, strict=True):
                assert slot not in written, f"{label}: slot {slot} is written twice in step {expected.step_id}"
                written.add(slot)
                self.slots[slot] = token
        for label, label_arrays in arrays.items():
            for row, held in enumerate(expected.held[label]):
                if held is not None:
                    read = self._read_row(label_arrays, row)
                    assert read == held, f"step {expected.step_id}, {label}, row {row}: reads {read}, holds {held}"
        self._copy_pages(page_copies_after)

    def _read_row(self, arrays: Arrays, row: int) -> list[int | None]:
        first, end = arrays["paged_kv_indptr"][row : row + 2]
        pages = arrays["paged_kv_indices"][first:end]
        slots = [page * self.page_size + offset for page in pages for offset in range(self.page_size)]
        if not pages:
            return []
        num_unused = self.page_size - arrays["paged_kv_last_page_len"][row]
        return [self.slots.get(slot) for slot in slots[: len(slots) - num_unused]]

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            for offset in range(self.page_size):
                token = self.slots.get(source * self.page_size + offset)
                if token is None:
                    self.slots.pop(target * self.page_size + offset, None)
                else:
                    self.slots[target * self.page_size + offset] = token
