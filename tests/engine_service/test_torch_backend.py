"""`torch_backend.py`: attention over pages equals attention over each row's tokens in a row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.attention_backends import row_groups
from engine_service.attention_backends.torch_backend import TorchBackend
from engine_service.kv_cache import KvShape
from tests.engine_service.hand_plans import build_plan_arrays, build_scattered_arrays
from tests.reference.naive_planner import Arrays

NUM_KV_HEADS, HEAD_DIM = 2, 8
SHAPE = KvShape(num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
SCALE = 0.37

# (tokens before the step, span) of each row; None is a padding row.
Row = tuple[int, int] | None
ROWS = st.lists(st.none() | st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6).filter(any)


def attend_densely(arrays: Arrays, pages: torch.Tensor, query: torch.Tensor, page_size: int) -> torch.Tensor:
    """Softmax attention in float64, query token by query token, over the slots that the arrays name."""
    outputs = []
    for row, kv_len in enumerate(arrays["kv_lens"]):
        start, end = arrays["qo_indptr"][row : row + 2]
        first = arrays["paged_kv_indptr"][row]
        slots = [(arrays["paged_kv_indices"][first + t // page_size], t % page_size) for t in range(kv_len)]
        for token in range(start, end):
            num_read = kv_len - (end - token) + 1
            for head in range(query.shape[1]):
                kv_head = head // (query.shape[1] // NUM_KV_HEADS)
                keys = torch.stack([pages[page, 0, place, kv_head] for page, place in slots[:num_read]]).double()
                values = torch.stack([pages[page, 1, place, kv_head] for page, place in slots[:num_read]]).double()
                weights = torch.softmax(keys @ query[token, head].double() * SCALE, dim=0)
                outputs.append(weights @ values)
    return torch.stack(outputs).view(query.shape).float()


def check(rows: list[Row], page_size: int, num_heads: int) -> None:
    """Compares the backend with dense attention; slots that no row of a stream reads hold NaN."""
    arrays = build_scattered_arrays(rows, page_size)
    num_pages = max(arrays["paged_kv_indices"], default=0) + 1
    generator = torch.Generator().manual_seed(len(rows))
    pages = torch.full((num_pages, 2, page_size, NUM_KV_HEADS, HEAD_DIM), torch.nan)
    for row, kv_len in enumerate(arrays["kv_lens"]):
        first = arrays["paged_kv_indptr"][row]
        for token in range(kv_len if rows[row] else 0):
            page = arrays["paged_kv_indices"][first + token // page_size]
            pages[page, :, token % page_size] = torch.randn((2, NUM_KV_HEADS, HEAD_DIM), generator=generator)
    query = torch.randn((arrays["qo_indptr"][-1], num_heads, HEAD_DIM), generator=generator)
    backend = TorchBackend(SHAPE, page_size=page_size, device=torch.device("cpu"))
    found = backend.attend(pages, query, backend.prepare(build_plan_arrays("main", arrays)), SCALE)
    expected = attend_densely(arrays, pages, query, page_size)
    starts = arrays["qo_indptr"]
    real = [token for row, one in enumerate(rows) if one for token in range(starts[row], starts[row + 1])]
    assert found.shape == query.shape
    assert torch.isfinite(found[real]).all()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(7, 1), (7, 1)],
        [(5, 1), (8, 1), None],
        [None, (30, 1), (2, 1), None, (11, 1)],
        [(0, 40)],
        [(13, 40)],
        [(0, 3), (5, 2), (9, 7)],
        [(0, 20), (6, 1), None, (4, 3), (17, 18), (0, 1)],
    ],
)
def test_attention_over_pages_equals_dense_attention(rows: list[Row], page_size: int) -> None:
    """Decode, whole prompts, chunks, short spans and padding rows, alone and mixed, with NaN wherever it can stand."""
    check(rows, page_size, num_heads=6)


@settings(max_examples=25)
@given(
    rows=ROWS,
    page_size=st.integers(1, 9),
    group_bytes=st.sampled_from([1, 4096, 1 << 20]),
    wasted=st.sampled_from([0, 16, 256]),
)
def test_any_rows_in_any_groups_equal_dense_attention(
    rows: list[Row], page_size: int, group_bytes: int, wasted: int
) -> None:
    """However the rows are cut into groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_groups, "MAX_GROUP_BYTES", group_bytes)
        patch.setattr(row_groups, "_WASTED_TOKENS_PER_CALL", wasted)
        check(rows, page_size, num_heads=2)


def test_one_backend_serves_steps_of_any_size() -> None:
    """Its buffer is reused: a small step after a large one, and the other way round."""
    page_size = 4
    backend = TorchBackend(SHAPE, page_size=page_size, device=torch.device("cpu"))
    for length in (3, 50, 2, 200, 1):
        arrays = build_scattered_arrays([(length, 1)], page_size)
        pages = torch.randn((60, 2, page_size, NUM_KV_HEADS, HEAD_DIM))
        query = torch.randn((1, 4, HEAD_DIM))
        found = backend.attend(pages, query, backend.prepare(build_plan_arrays("main", arrays)), SCALE)
        torch.testing.assert_close(found, attend_densely(arrays, pages, query, page_size), rtol=1e-4, atol=1e-5)
