"""Attention backends against float64, within what the number type explains."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from engine_service.attention_backends.base import GraphBackend
from engine_service.device_plan import DeviceArrays
from engine_service.kv_cache import KvShape
from planner_service.client import ARRAY_NAMES, PlanArrays
from tests.engine_service.hand_plans import build_plan_arrays, build_scattered_arrays
from tests.gpu.dense_attention import attend_row
from tests.gpu.side import Side
from tests.reference.naive_planner import Arrays

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 128
# So many query heads a key head that FlashInfer decodes on tensor cores, with its kernels for prompts.
MANY_HEADS = 8
SCALE = HEAD_DIM**-0.5

# FlashInfer compiles its kernels when they are first used.
pytestmark = pytest.mark.timeout(200)

# (tokens before the step, span) of each row; None is a padding row.
Rows = Sequence[tuple[int, int] | None]
DECODE: Rows = [(0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (100, 1), (1_300, 1), None]
OTHER_DECODE: Rows = [(2, 1), (1, 1), (400, 1), (3, 1), None, None, None, None]
PREFILL: Rows = [(0, 70), (33, 5), (128, 64), (0, 1)]
MIXED: Rows = [(17, 1), (0, 40), None, (5, 0), (300, 3)]


@dataclass(frozen=True)
class Case:
    """A plan label, one layer of a cache and queries."""

    rows: Rows
    lists: Arrays
    arrays: PlanArrays
    device_arrays: DeviceArrays
    pages: torch.Tensor
    query: torch.Tensor


def build_case(side: Side, rows: Rows, page_size: int, dtype: torch.dtype, num_heads: int = NUM_HEADS) -> Case:
    """Draws keys, values and queries; whatever no stream has written holds NaN, the sink page too."""
    lists = build_scattered_arrays(rows, page_size)
    generator = torch.Generator().manual_seed(len(rows))
    num_pages = max(lists["paged_kv_indices"]) + 1
    pages = torch.full((num_pages, 2, page_size, NUM_KV_HEADS, HEAD_DIM), torch.nan)
    for row, one in enumerate(rows):
        for token in range(lists["kv_lens"][row] if one else 0):
            page = lists["paged_kv_indices"][lists["paged_kv_indptr"][row] + token // page_size]
            pages[page, :, token % page_size] = torch.randn((2, NUM_KV_HEADS, HEAD_DIM), generator=generator)
    query = torch.randn((lists["qo_indptr"][-1], num_heads, HEAD_DIM), generator=generator)
    columns = {name: torch.tensor(lists[name], dtype=torch.int32, device=side.device) for name in ARRAY_NAMES}
    return Case(
        rows,
        lists,
        build_plan_arrays("main", lists),
        DeviceArrays("main", **columns),
        pages.to(side.device, dtype),
        query.to(side.device, dtype),
    )


def check(case: Case, found: torch.Tensor, page_size: int) -> None:
    """Compares every row of a stream with float64."""
    for row, one in enumerate(case.rows):
        start, end = case.lists["qo_indptr"][row : row + 2]
        if one is None or start == end:
            continue
        dense = attend_row(case.lists, row, case.pages, case.query, SCALE, page_size)
        error = (found[start:end].double() - dense.output).abs()
        assert bool((error <= dense.bound).all()), f"row {row}: {(error / dense.bound).max():.2f} times the bound"
        # A bound that a wrong result would keep shows nothing: it is far below what the results are.
        assert float(dense.bound.mean()) < 0.1 * float(dense.output.abs().mean())


@pytest.mark.parametrize(
    ("rows", "num_heads"),
    [(DECODE, NUM_HEADS), (DECODE, MANY_HEADS), (PREFILL, NUM_HEADS), (MIXED, MANY_HEADS)],
    ids=["decode", "decode-many", "prefill", "mixed-many"],
)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend_name", ["torch", "flashinfer"])
def test_attention_is_that_of_float64(
    side: Side, backend_name: str, dtype: torch.dtype, page_size: int, rows: Rows, num_heads: int
) -> None:
    """Decode batches, prompts and both together, with padding rows and rows that only read; nothing reads NaN."""
    case = build_case(side, rows, page_size, dtype, num_heads)
    shape = KvShape(num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    backend = side.build_backend(backend_name, shape, num_heads=num_heads, page_size=page_size)
    batch = backend.prepare(case.arrays, case.device_arrays)
    check(case, backend.attend(case.pages, case.query, batch, SCALE), page_size)


@pytest.mark.parametrize("num_heads", [NUM_HEADS, MANY_HEADS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_captured_batch_is_replayed_with_another_plan(side: Side, dtype: torch.dtype, num_heads: int) -> None:
    """One capture serves steps with other pages and lengths, whose schedules are made outside of it."""
    page_size = 16
    cases = [build_case(side, rows, page_size, dtype, num_heads) for rows in (DECODE, OTHER_DECODE, DECODE)]
    shape = KvShape(num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    backend = side.build_backend("flashinfer", shape, num_heads=num_heads, page_size=page_size)
    assert isinstance(backend, GraphBackend)
    pages = torch.zeros_like(max((case.pages for case in cases), key=len))
    query = torch.zeros_like(cases[0].query)
    batch = backend.build_graph_batch(len(DECODE), 1_000)
    capturer, replay, result = side.build_capturer(), None, torch.empty(0)
    for case in cases:
        pages[: len(case.pages)].copy_(case.pages)
        query.copy_(case.query)
        backend.replan(batch, case.arrays, case.device_arrays)
        if replay is None:
            replay, result = capturer.capture(lambda: backend.attend(pages, query, batch, SCALE))
        replay()
        check(case, result, page_size)
