"""`row_groups.py`: rows that are cheap to attend together are, the others are not."""

import numpy as np

from engine_service.attention_backends import row_groups
from engine_service.attention_backends.row_groups import MAX_GROUPED_SPAN, build_row_groups
from tests.engine_service.hand_plans import build_plan_arrays, build_scattered_arrays


def test_decode_rows_of_like_length_are_one_group_in_batch_order() -> None:
    """So nothing is gathered or scattered but keys and values."""
    arrays = build_plan_arrays("main", build_scattered_arrays([(40, 1), (35, 1), (52, 1)], 4))
    groups = build_row_groups(arrays, page_size=4, bytes_per_token=128)
    assert [group.token_index.ravel().tolist() for group in groups] == [[0, 1, 2]]


def test_rows_far_apart_in_length_are_not_padded_to_each_other() -> None:
    """A short row does not read as much as a long one."""
    arrays = build_plan_arrays("main", build_scattered_arrays([(3, 1), (3000, 1), (5, 1), (2900, 1)], 16))
    groups = build_row_groups(arrays, page_size=16, bytes_per_token=128)
    assert sorted(sorted(group.kv_lens.tolist()) for group in groups) == [[4, 6], [2901, 3001]]


def test_a_group_gathers_no_more_than_its_limit() -> None:
    """Unless a single row is longer than that."""
    arrays = build_plan_arrays("main", build_scattered_arrays([(999, 1)] * 10, 16))
    bytes_per_token = row_groups.MAX_GROUP_BYTES // 4000
    groups = build_row_groups(arrays, page_size=16, bytes_per_token=bytes_per_token)
    assert [len(group.kv_lens) for group in groups] == [4, 4, 2]
    assert sorted(np.concatenate([group.token_index.ravel() for group in groups]).tolist()) == list(range(10))


def test_long_spans_stand_alone_and_short_ones_are_padded_together() -> None:
    """Decode rows, short spans and chunks of prompts are kept apart; every query token stands in one group."""
    rows = [(0, 1), (3, MAX_GROUPED_SPAN + 1), (7, 4), (0, 0), (2, 3), (0, 40), (9, 1)]
    arrays = build_plan_arrays("main", build_scattered_arrays(rows, 4))
    groups = build_row_groups(arrays, page_size=4, bytes_per_token=128)
    assert [group.spans.tolist() for group in groups] == [[1, 1], [4, 3], [17], [40]]
    real = [group.token_index[row, :span] for group in groups for row, span in enumerate(group.spans)]
    assert sorted(np.concatenate(real).tolist()) == list(range(sum(span for _, span in rows)))


def test_padding_reads_slots_that_the_row_wrote() -> None:
    """Beyond a row's end stands its first slot, never one that may hold anything."""
    arrays = build_plan_arrays("main", build_scattered_arrays([(9, 1), (2, 1)], 4))
    (group,) = build_row_groups(arrays, page_size=4, bytes_per_token=128)
    for row, kv_len in enumerate(group.kv_lens.tolist()):
        slots = group.slots[row].tolist()
        assert len(set(slots[:kv_len])) == kv_len
        assert set(slots[kv_len:]) <= {slots[0]}
