"""`flashinfer_schedule.py`: a schedule depends on what FlashInfer's planners read, no more and no less."""

from hypothesis import given
from hypothesis import strategies as st

from engine_service.attention_backends.flashinfer_schedule import Kernels, build_schedule_key, is_decode
from tests.engine_service.hand_plans import build_plan_arrays, build_scattered_arrays

Row = tuple[int, int] | None

ROWS = st.lists(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=3)


def read_schedule_inputs(rows: list[Row], page_size: int, kernels: Kernels) -> list[tuple[int, ...]]:
    """What `PrefillPlan` and `DecodePlan` (FA2) or `PrefillSM90Plan` (FA3) read of each row, row by row."""
    inputs = []
    for length, span in ((0, 1) if row is None else row for row in rows):
        kv_len = length + span
        num_pages = 0
        while num_pages * page_size < kv_len:
            num_pages += 1
        inputs.append((span, num_pages) if kernels is Kernels.FA2 else (span, num_pages, kv_len))
    return inputs


@given(one=ROWS, other=ROWS, page_size=st.integers(1, 5), kernels=st.sampled_from(Kernels))
def test_equal_keys_mean_equal_inputs(one: list[Row], other: list[Row], page_size: int, kernels: Kernels) -> None:
    """Two plan labels have equal keys if and only if FlashInfer would read the same of both."""
    keys = [
        build_schedule_key(build_plan_arrays("main", build_scattered_arrays(rows, page_size)), kernels)
        for rows in (one, other)
    ]
    inputs = [read_schedule_inputs(rows, page_size, kernels) for rows in (one, other)]
    assert (keys[0] == keys[1]) == (inputs[0] == inputs[1])


@given(rows=ROWS, step=st.integers(0, 3))
def test_lengths_within_a_page_matter_to_fa3_alone(rows: list[Row], step: int) -> None:
    """Rows of pages so large that no step leaves the first: FA2 keeps its schedule, FA3 does only for equal lengths."""
    page_size = 64
    later = [row and (row[0] + step, row[1]) for row in rows]
    one, other = (
        build_plan_arrays("main", build_scattered_arrays([row and (1 + row[0], row[1]) for row in some], page_size))
        for some in (rows, later)
    )
    assert build_schedule_key(one, Kernels.FA2) == build_schedule_key(other, Kernels.FA2)
    is_equal = build_schedule_key(one, Kernels.FA3) == build_schedule_key(other, Kernels.FA3)
    assert is_equal == (rows == later)


@given(rows=ROWS)
def test_decode_is_one_token_a_row(rows: list[Row]) -> None:
    """Two rows of 0 and 2 tokens are not, though there are as many tokens as rows."""
    arrays = build_plan_arrays("main", build_scattered_arrays(rows, 4))
    assert is_decode(arrays) == all(row is None or row[1] == 1 for row in rows)


def test_as_many_tokens_as_rows_is_not_enough_for_decode() -> None:
    """The example that a count would get wrong."""
    assert not is_decode(build_plan_arrays("main", build_scattered_arrays([(3, 0), (3, 2)], 4)))
